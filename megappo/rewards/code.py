"""Python programs, run against tests in a sandbox."""

from dataclasses import dataclass, field

from megappo.errors import DataError
from megappo.rewards.checks import check_count, check_number, check_switch
from megappo.rewards.code_cases import Verdict, find_program, read_cases
from megappo.rewards.sandbox.host import Limits, check_sandbox, run_programs
from megappo.rewards.types import CallLimit, Reward, Sample

_MB = 1 << 20
_KB = 1 << 10


@dataclass(kw_only=True, slots=True)
class CodeReward:
    """Score 1 if the program of the response passes all tests of the row, else 0; or the share that it passes.

    Parts: `program`, 1 if the response holds one; and the share of the tests by what became of them: `passed`, `wrong`,
    `error`, `timeout`, `memory`, `output`.

    What is run is Python with the packages that megappo sees, without network, with no files but system folders and
    Python's own (read-only), in an empty folder in memory. Each input has a process and a folder of its own. Scores one
    sample a call: `reward.concurrency` of them at a time.
    """

    tests_key: str | None = None
    """Extra column of the row that holds the tests; null: its answer does."""
    partial: bool = False
    """Score the share of the tests that pass."""
    time_s: float = 5.0
    """Wall-clock time of one run, the start of Python included."""
    total_s: float = 30.0
    """Wall-clock time of one sample; tests that are not reached count as timeout. Below reward.timeout_s."""
    memory_mb: int = 512
    """MiB of memory of all processes of a run together."""
    disk_mb: int = 32
    """MiB of the files of a run together; they are kept in memory too."""
    output_kb: int = 256
    """KiB that a run may write to standard output and standard error."""
    processes: int = 16
    """Processes and threads of a run at one time."""
    _limits: Limits = field(init=False, repr=False)

    def __post_init__(self) -> None:
        if self.tests_key is not None and not isinstance(self.tests_key, str):
            raise DataError(f"reward code: params.tests_key={self.tests_key!r} must be the name of a column")
        check_switch("code", "partial", self.partial)
        check_number("code", "time_s", self.time_s, least=0.1)
        check_number("code", "total_s", self.total_s, least=self.time_s)
        check_count("code", "memory_mb", self.memory_mb, least=64)
        check_count("code", "disk_mb", self.disk_mb, least=4)
        check_count("code", "output_kb", self.output_kb, least=1)
        check_count("code", "processes", self.processes, least=2)
        self._limits = Limits(
            time_s=self.time_s,
            total_s=self.total_s,
            memory_bytes=self.memory_mb * _MB,
            disk_bytes=self.disk_mb * _MB,
            output_bytes=self.output_kb * _KB,
            processes=self.processes,
        )
        check_sandbox(self._limits)

    @property
    def call_limit(self) -> CallLimit:
        """All runs of a sample."""
        return CallLimit(seconds=self.total_s, param="total_s")

    async def __call__(self, sample: Sample) -> Reward:
        """Score one sample.

        Raises:
            DataError: the row has no tests.
            RewardError: the sandbox failed, as opposed to the program.
        """
        cases = read_cases(sample, key=self.tests_key)
        program = find_program(sample.response)
        if program is None:
            return Reward(score=0.0, parts={"program": 0.0} | {verdict.value: 0.0 for verdict in Verdict})
        verdicts = cases.verdicts(await run_programs(cases.programs(program), self._limits))
        shares = {verdict.value: verdicts.count(verdict) / len(verdicts) for verdict in Verdict}
        passed = shares[Verdict.passed]
        return Reward(score=passed if self.partial else float(passed == 1.0), parts={"program": 1.0} | shares)

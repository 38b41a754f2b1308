"""The ways in which an algorithm is run, in the order of tables and plots: the one list of them."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Mode:
    """What a way of running is called, and the script and flags that it takes."""

    name: str
    suffix: str | None = None
    """what follows the algorithm's name in that of the script; None where a program of peers/ runs all"""
    flags: tuple[str, ...] = ()
    library: str | None = None
    """the library whose script it is, by its field of the collection; None of ours"""
    program: tuple[str, ...] = ()
    """the program of peers/ that runs it, with its first argument"""

    @property
    def label(self) -> str:
        """Its name in a table."""
        return f"{self.name} `{' '.join(self.flags)}`" if self.flags else self.name


COMPILE, BOTH = ("--compile",), ("--compile", "--cudagraphs")
MODES = {
    "cleanrl": Mode("CleanRL", library="cleanrl", program=("cleanrl.py",)),
    "leanrl": Mode("original LeanRL eager", "", library="leanrl"),
    "leanrl_compile": Mode("original LeanRL", "_torchcompile", COMPILE, library="leanrl"),
    "leanrl_both": Mode("original LeanRL", "_torchcompile", BOTH, library="leanrl"),
    "sb3": Mode("Stable-Baselines3", library="sb3", program=("sb3_sbx.py", "sb3")),
    "sbx": Mode("SBX (JAX)", library="sbx", program=("sb3_sbx.py", "sbx")),
    "rltools": Mode("RLtools (C++)", library="rltools", program=("rl_tools.py",)),
    "eager": Mode("LeanRL eager", ""),
    "twin": Mode("LeanRL twin, no flag", "_torchcompile"),
    "compile": Mode("LeanRL", "_torchcompile", COMPILE),
    "cudagraphs": Mode("LeanRL", "_torchcompile", ("--cudagraphs",)),
    "both": Mode("LeanRL", "_torchcompile", BOTH),
    "tf32": Mode("LeanRL", "_torchcompile", (*BOTH, "--precision", "tf32")),
    "bfloat16": Mode("LeanRL", "_torchcompile", (*COMPILE, "--precision", "bfloat16")),
    "bfloat16_both": Mode("LeanRL", "_torchcompile", (*BOTH, "--precision", "bfloat16")),
}
LIBRARIES = tuple(name for name, mode in MODES.items() if mode.library)
ORIGINAL = tuple(name for name in LIBRARIES if MODES[name].library == "leanrl")
PEERS = tuple(name for name in LIBRARIES if name not in ORIGINAL)  # which run with one interpreter
CUDA_MODES = tuple(name for name, mode in MODES.items() if "--cudagraphs" in mode.flags)

"""Checks the CPU install: the engines import, and no media wheel is there that breaks them. Run by install.sh."""

import importlib
import importlib.util
import sys

ENGINES = ("torch", "megatron.core", "ray", "transformers", "vllm")
MEDIA = ("torchvision", "torchaudio", "torchcodec")  # transformers imports them where they exist


def problem_of(module: str) -> str | None:
    """Why ``module`` cannot be imported; None if it can."""
    try:
        importlib.import_module(module)
    except Exception as error:  # noqa: BLE001 - a broken wheel may raise anything
        return f"{type(error).__name__}: {error}"
    return None


def main() -> int:
    problems = {}
    for module in MEDIA:
        if importlib.util.find_spec(module) and (problem := problem_of(module)):
            problems[module] = f"{problem}\n  hint: {sys.executable} -m pip uninstall -y {' '.join(MEDIA)}"
    for module in ENGINES:
        if not problems and (problem := problem_of(module)):
            problems[module] = f"{problem}\n  hint: remove the virtual environment and install again"
    for module, problem in problems.items():
        print(f"install: {module} is broken: {problem}", file=sys.stderr)
    if not problems:
        print(f"install: {', '.join(f'{m} {sys.modules[m].__version__}' for m in ENGINES)}: all import")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())

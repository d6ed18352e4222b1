"""``hybridflow report <run folder>``: build report.html again, also of a run that is going on or has crashed."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from hybridflow.errors import HybridFlowError
from hybridflow.telemetry.console import print_failure
from hybridflow.telemetry.report import build_report


def main(argv: Sequence[str] | None = None) -> int:
    """Build the page and print its path; exit code 2 where the folder is not one of a run."""
    parser = argparse.ArgumentParser(prog="hybridflow report", description=__doc__)
    parser.add_argument("run_dir", metavar="run-folder", nargs="+", help="such as runs/demo")
    options = parser.parse_args(argv)
    try:
        for folder in options.run_dir:
            print(build_report(folder))
    except HybridFlowError as error:
        print_failure(error)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())

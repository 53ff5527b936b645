"""What did every bench find, and what of it is older than the code it measures?

Writes docs/results.md with its pictures, docs/coverage.md and the table in README, from
bench/results/*.json:

    python bench/report.py
    python bench/report.py --check     # writes nothing; exit code 1 where a page is not up to date
    python bench/report.py --ages      # how many commits changed what each run measured, then stops

Figures are chosen in report_parts/shown.py, claims of papers in report_parts/papers.py, pictures in
report_parts/plots.py. The pages
depend on nothing but the results, those two tables and what git says of the age of results. `make
results` runs this as `kvweave bench report`.
"""

import argparse
import sys

from common.files import REPO
from report_parts import coverage_page, readme_table, results_page
from report_parts.history import num_changes, why_unknown
from report_parts.plots import write_pictures
from report_parts.results_page import RunKey, key_of, marked_in, runs_on_the_page


def ages() -> dict[RunKey, int]:
    """For each run on the page how many changes of its code came behind it."""
    return {
        key_of(result.file, run): num_changes(result.file, run, result.measures)
        for result, run in runs_on_the_page()
    }


def older_runs() -> set[RunKey]:
    """The runs on the page whose code was changed behind them."""
    return {key for key, changes in ages().items() if changes}


def print_ages() -> int:
    """The most changed first: what to measure again."""
    if why := why_unknown():
        print(why, file=sys.stderr)
        return 1
    for key, changes in sorted(ages().items(), key=lambda item: -item[1]):
        print(f"{changes:5} {key.file}, {key.date}, {key.commit}")
    return 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="write nothing, say what would change")
    parser.add_argument("--ages", action="store_true", help="count the changes behind each run")
    args = parser.parse_args()
    if args.ages:
        return print_ages()
    if why := why_unknown():
        print(f"ages of results are kept as they were: {why}", file=sys.stderr)
        older = marked_in(results_page.PAGE.read_text())
    else:
        older = older_runs()
    behind = write_pictures(check=args.check)
    for page in (results_page, coverage_page, readme_table):
        text = page.render(older)
        if page.PAGE.is_file() and page.PAGE.read_text() == text:
            continue
        behind += 1
        if args.check:
            print(f"{page.PAGE.relative_to(REPO)} is not what `make results` writes")
        else:
            page.PAGE.write_text(text)
            print(f"{page.PAGE.relative_to(REPO)} written")
    shown = len(list(runs_on_the_page()))
    print(f"{len(older)} of {shown} runs on the page are older than the code they measure")
    return int(bool(behind) and args.check)


if __name__ == "__main__":
    sys.exit(main())

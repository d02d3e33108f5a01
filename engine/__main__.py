"""`python -m engine`: its words -> an exit status (`engine.cli.arguments`, imported where Ctrl-C is answered)."""

from __future__ import annotations

import sys


def main(words: list[str] | None = None) -> int:
    try:
        from engine.cli import arguments

        return arguments.main(sys.argv[1:] if words is None else words)
    except KeyboardInterrupt:
        print("error: stopped", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())

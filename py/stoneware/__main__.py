"""`python -m stoneware`: the same as the program `stoneware`."""

from __future__ import annotations

if __name__ == "__main__":
    from stoneware.cli.main import main

    main()

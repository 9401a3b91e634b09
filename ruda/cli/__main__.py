"""`python -m ruda.cli` is `ruda`."""

from ruda.cli import main

if __name__ == "__main__":
    main()

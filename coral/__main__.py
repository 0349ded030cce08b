"""``python -m coral``: the command line."""

from coral.cli import main

if __name__ == "__main__":
    main()

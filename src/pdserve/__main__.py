"""`python -m pdserve`."""

from pdserve.cli.main import main

if __name__ == "__main__":
    main()

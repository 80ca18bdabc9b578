"""Runs `webhookd` as `python -m webhookd`."""

from webhookd.cli.main import main

if __name__ == "__main__":
    main()

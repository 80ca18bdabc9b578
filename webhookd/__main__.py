"""`python -m webhookd` is `webhookd`."""

from webhookd.cli.main import main

if __name__ == "__main__":
    main()

"""Files that a user names: read within a bound, whatever they are; what cannot be read is a usage error."""

import click


def read_bounded(name: str, what: str, max_bytes: int) -> bytes:
    """All of a file, or of stdin for `-`.

    A device without end is refused at the bound. A FIFO is read as any file: `<(…)` of a shell is one.
    """
    try:
        with click.open_file(name, "rb") as stream:
            data: bytes = stream.read(max_bytes + 1)
    except OSError as error:
        raise click.UsageError(f"{what}: {name} cannot be read: {error.strerror}") from error
    if len(data) > max_bytes:
        raise click.UsageError(f"{what}: {name} is larger than {max_bytes} bytes")
    return data

"""The package index: which one, and a client whose errors are put into words."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from .errors import BedplateError

if TYPE_CHECKING:
    import requests
    from pypi_simple import PyPISimple

# requests and pypi-simple are imported where they are used: they take longer to import than a cached check takes.

INDEX_VARIABLES = ("UV_DEFAULT_INDEX", "UV_INDEX_URL", "PIP_INDEX_URL")


def default_index() -> str:
    """Return the index of $UV_DEFAULT_INDEX, $UV_INDEX_URL or $PIP_INDEX_URL, else the public one."""
    from pypi_simple import PYPI_SIMPLE_ENDPOINT

    for variable in INDEX_VARIABLES:
        if value := os.environ.get(variable, "").strip():
            return re.sub(r"^[A-Za-z0-9._-]+=", "", value)  # uv also takes NAME=URL
    return PYPI_SIMPLE_ENDPOINT


@contextmanager
def open_index(url: str = "", session: requests.Session | None = None) -> Iterator[PyPISimple]:
    """Yield a client of the package index at *url*, or of `default_index`.

    Args: session: connections to use again; they stay open then. Errors inside the block come out as BedplateError:
    an index that is out of reach or answers with something else than an index, a project it does not have, a
    download that is not the file it announced.
    """
    import requests
    from pydantic import ValidationError  # of pypi-simple, for JSON that has the wrong keys
    from pypi_simple import DigestMismatchError, NoDigestsError, NoSuchProjectError, PyPISimple
    from pypi_simple import UnsupportedContentTypeError as NoIndexPageError
    from pypi_simple import UnsupportedRepoVersionError as NewIndexError

    chosen = url or default_index()
    client = PyPISimple(chosen, session=session)
    try:
        yield client
    except NoSuchProjectError as error:
        raise BedplateError(f"{chosen} has no package {error.project}") from error
    except (requests.RequestException, NoIndexPageError, NewIndexError, ValidationError) as error:
        raise BedplateError(f"cannot read the index {chosen}: {error}") from error
    except (DigestMismatchError, NoDigestsError) as error:
        raise BedplateError(f"a file of {chosen} is not the one that it announces: {error}") from error
    finally:
        if session is None:
            client.s.close()

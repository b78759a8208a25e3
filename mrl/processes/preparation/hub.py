"""Files of the Hugging Face hub, fetched into the hub's cache on this machine: a repository at a commit is a folder.

`huggingface_hub` speaks to the hub, so that cache, token and endpoint are those that people know (HF_HOME,
HF_HUB_CACHE, HF_TOKEN, HF_ENDPOINT, HF_HUB_OFFLINE). Of a model only the files that a policy needs are
fetched: settings, tokenizer, chat template, weights in safetensors; never code. Each file is checked against the hub's
own digest. Whole files are kept when something goes wrong, so that the next attempt goes on from there.
"""

import hashlib
import json
import shutil
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from mrl.errors import MissingError, ModelFolderError, UserError
from mrl.files import DISK_FULL, replace_file
from mrl.hub_names import COMMIT, MAIN, AskedBy, HubName, listing_file, not_here, snapshot
from mrl.models.tensor_header import INDEX, WEIGHTS
from mrl.processes.preparation.model_folder import weight_files

CONFIG, TOKENIZER = "config.json", "tokenizer.json"
SMALL_FILES = frozenset(
    (*(CONFIG, "generation_config.json", "chat_template.jinja", "chat_template.json", "tokenizer.json"),
     *("tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "vocab.json", "merges.txt"),
     *("tokenizer.model", "tiktoken.model", "tekken.json", "preprocessor_config.json", "processor_config.json"))
)  # fmt: skip
"""Files of a policy's model other than weights; `*.tiktoken` is fetched, too."""
EXAMPLES = {"model": "Qwen/Qwen3-0.6B", "dataset": "openai/gsm8k"}
ANSWER_S = 30.0
"""Seconds that one request to the hub may take."""
SPARE_BYTES = 64 * 1024 * 1024
BLOCK_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class HubFile:
    """A file as the hub lists it: its size, and its digest there (SHA-256, or that of a Git blob)."""

    size_bytes: int
    sha256: str
    blob_id: str


@dataclass(frozen=True, slots=True)
class Listing:
    """Commit and files of a revision."""

    commit: str
    files: Mapping[str, HubFile]


def is_whole(folder: Path) -> bool:
    """Whether a folder of the cache has a config.json, a tokenizer and all weights, which are fetched last."""
    try:
        return (folder / CONFIG).is_file() and (folder / TOKENIZER).is_file() and bool(weight_files(folder, "", ""))
    except (OSError, ModelFolderError):
        return False


def commit_of(name: HubName, asked: AskedBy) -> str:
    """Return a name's own commit, or ask the hub for it. Raises UserError; MissingError without an answer."""
    return name.commit or listing_of(name, asked).commit


def known_commit(name: HubName) -> str:
    """Return the commit that a model's name stood for when last fetched to this machine; "" if it never was."""
    from huggingface_hub import try_to_load_from_cache

    if name.commit:
        return name.commit
    found = try_to_load_from_cache(name.id, CONFIG, revision=name.revision or MAIN)
    return Path(found).parent.name if isinstance(found, str) else ""


def fetch(name: HubName, asked: AskedBy, *, revision: str, tell: Callable[[str], None]) -> Path:
    """Fetch the files of a model that are missing or cut off, check them against their digests, and return its folder.

    The cache notes the commit as that of `revision`, if the hub still says so, for times without a network. `tell` gets
    lines about the files. Raises UserError, in one line, for whatever prevents the fetch.
    """
    listing = listing_of(name, asked)
    pinned = name.at(listing.commit)
    folder = snapshot(pinned)
    files = _wanted(listing, name, asked)
    if INDEX in listing.files and INDEX in files:
        lacking = {INDEX: listing.files[INDEX]}
        _get_all(pinned, lacking, folder, asked, lambda _: None)
        files |= _shards(folder / INDEX, listing, name, asked)
    fetch_files(pinned, listing, files, asked, revision=revision, tell=tell)
    return folder


def fetch_files(
    pinned: HubName,
    listing: Listing,
    files: Mapping[str, HubFile],
    asked: AskedBy,
    *,
    revision: str,
    tell: Callable[[str], None],
) -> None:
    """Fetch those of `files`, of one revision, that are missing here or cut off; otherwise as `fetch`."""
    folder, anchor = snapshot(pinned), next(iter(files))
    lacking = {file: entry for file, entry in files.items() if not _is_here(folder / file, entry)}
    if lacking:
        size_bytes = sum(entry.size_bytes for entry in lacking.values())
        _check_room(folder, size_bytes, asked)
        tell(f"fetching {pinned}: {len(lacking)} of {len(files)} files, {_size(size_bytes)}, into {folder}")
        _get_all(pinned, lacking, folder, asked, tell)
    asked_for = replace(pinned, revision=revision)
    if not COMMIT.fullmatch(revision) and listing_of(asked_for, asked).commit == listing.commit:
        with _told(asked_for, asked):
            _download(pinned, anchor, revision or MAIN, anew=False)


def _wanted(listing: Listing, name: HubName, asked: AskedBy) -> dict[str, HubFile]:
    """Return a policy's files in a listing, weights last. Raises ModelFolderError where weights are no safetensors."""
    files = {file: entry for file, entry in listing.files.items() if file in SMALL_FILES or file.endswith(".tiktoken")}
    if CONFIG not in files:
        raise ModelFolderError(
            f"the repository {name} has no {CONFIG}",
            where=asked.key,
            got=", ".join(sorted(listing.files)[:4]) or "no file",
            wanted="a causal language model in Hugging Face format",
        )
    if TOKENIZER not in files:
        raise ModelFolderError(
            f"the repository {name} has no {TOKENIZER}",
            where=asked.key,
            cure="choose a repository or revision that has it, or make a model folder that has it (save_pretrained)",
        )
    for weights in (INDEX, WEIGHTS):
        if weights in listing.files:
            return files | {weights: listing.files[weights]}
    others = [file for file in sorted(listing.files) if file.endswith((".safetensors", ".bin", ".pt", ".gguf", ".pth"))]
    raise ModelFolderError(
        f"the repository {name} has no safetensors weights",
        where=asked.key,
        got=", ".join(others[:4]) or "no weights",
        wanted=f"{WEIGHTS}, or {INDEX} and its files",
        cure="choose a repository or revision that has them, or convert the model to a folder (model.save_pretrained)",
    )


def _shards(index: Path, listing: Listing, name: HubName, asked: AskedBy) -> dict[str, HubFile]:
    """Return the files that an index of weights names. Raises ModelFolderError where the listing lacks one."""
    try:
        named = sorted({str(file) for file in json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()})
        return {file: listing.files[file] for file in named}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ModelFolderError(
            f"{INDEX} of {name} cannot be read, or names files that the repository does not have",
            where=asked.key,
            got=f"{type(error).__name__}: {error}",
            cure="choose another revision",
        ) from None


def _get_all(
    name: HubName, files: Mapping[str, HubFile], folder: Path, asked: AskedBy, tell: Callable[[str], None]
) -> None:
    """Fetch those of `files`, at the commit of `name`, that are not here, and check their digests."""
    for number, (file, entry) in enumerate(files.items(), start=1):
        here = folder / file
        if _is_here(here, entry):
            continue
        tell(f"  {number}/{len(files)} {file} ({_size(entry.size_bytes)})")
        with _told(name, asked):
            _download(name, file, name.commit, anew=here.exists())
        if not _is_same(here, entry):
            _drop(here)
            raise ModelFolderError(
                f"{file} of {name} has a wrong checksum after the download",
                where=asked.key,
                wanted=entry.sha256 or entry.blob_id,
                cure=f"{asked.fetch} downloads it again; first check the proxy or mirror (HF_ENDPOINT), if any",
            )


def _download(name: HubName, file: str, revision: str, *, anew: bool) -> None:
    from huggingface_hub import hf_hub_download

    hf_hub_download(name.id, file, revision=revision, repo_type=name.kind, force_download=anew)


def listing_of(name: HubName, asked: AskedBy) -> Listing:
    """Ask the hub for commit and files of a revision. Raises UserError; MissingError without an answer."""
    from huggingface_hub import HfApi

    with _told(name, asked):
        ask = HfApi().model_info if name.kind == "model" else HfApi().dataset_info
        info = ask(name.id, revision=name.revision or MAIN, files_metadata=True, timeout=ANSWER_S)
        files = {
            sibling.rfilename: HubFile(
                sibling.size or 0, sibling.lfs.sha256 if sibling.lfs else "", sibling.blob_id or ""
            )
            for sibling in info.siblings or ()
        }
    if not info.sha or not COMMIT.fullmatch(info.sha):
        raise _no_hub(name, asked, f"no commit hash for {name}")
    return Listing(info.sha, files)


def keep_listing(pinned: HubName, files: Collection[str], asked: AskedBy) -> None:
    """Note the files of a commit before they are fetched, so that missing ones are noticed later. Raises UserError."""
    place = listing_file(pinned)
    with _told(pinned, asked):
        place.parent.mkdir(parents=True, exist_ok=True)
        replace_file(place, json.dumps(sorted(files)).encode())


@contextmanager
def _told(name: HubName, asked: AskedBy) -> Iterator[None]:
    """Turn errors of the hub, the network or the disk into a UserError of one line."""
    from huggingface_hub import errors

    of_client: type[Exception] = errors.HfHubHTTPError.__bases__[0]  # versions of the package differ in HTTP client
    try:
        yield
    except errors.GatedRepoError:
        raise ModelFolderError(
            f"the {name.what} {name.id} is gated: its owner has to grant you access",
            where=asked.key,
            cure=f"request access at {_endpoint()}/{name.id}, then run `hf auth login` or set HF_TOKEN",
        ) from None
    except errors.RepositoryNotFoundError:
        raise ModelFolderError(
            f"no such folder here, and no {name.what} {name.id} on the hub that you can access",
            where=asked.key,
            wanted="a folder, or an id such as " + EXAMPLES[name.kind],
            cure="check the name; if it is private, run `hf auth login` or set HF_TOKEN",
        ) from None
    except errors.RevisionNotFoundError:
        raise ModelFolderError(
            f"the {name.what} {name.id} has no such revision",
            where=asked.key,
            got=name.revision or MAIN,
            wanted="a branch, a tag or a commit",
            cure=f"see {_endpoint()}/{name.id}/tree/main",
        ) from None
    except errors.HfHubHTTPError as error:
        raise _refused(error.response.status_code, name, asked) from None
    except errors.HFValidationError as error:
        raise ModelFolderError("not a valid hub id", where=asked.key, got=f"{name.id}: {error}") from None
    except (errors.OfflineModeIsEnabled, errors.LocalEntryNotFoundError) as error:
        raise _unreached(name, asked, _why(error)) from None
    except of_client as error:
        raise _unreached(name, asked, _why(error)) from None
    except OSError as error:
        raise _of_disk(error, name, asked) from None
    except RuntimeError as error:  # from hf_xet, which fetches large files in parallel
        raise _not_whole(error, name, asked) from None
    except (ValueError, KeyError, TypeError, AssertionError) as error:  # the server that answers is no hub
        raise _no_hub(name, asked, f"{type(error).__name__}: {error}") from None


def _why(error: BaseException) -> str:
    from huggingface_hub import constants, errors

    if constants.is_offline_mode() or isinstance(error, errors.OfflineModeIsEnabled):
        return "HF_HUB_OFFLINE is set"
    cause = error.__cause__ or error
    return f"{_endpoint()} cannot be reached ({type(cause).__name__})"


def _endpoint() -> str:
    from huggingface_hub import constants

    return str(constants.ENDPOINT)


def _unreached(name: HubName, asked: AskedBy, why: str) -> MissingError:
    return MissingError(
        not_here(name),
        where=asked.key,
        got=why,
        cure=f"{asked.fetch} on a host with network access and the same HF_HOME",
    )


def _refused(status: int, name: HubName, asked: AskedBy) -> UserError:
    if status in (401, 403):
        return ModelFolderError(
            f"the hub denies access to the {name.what} {name.id}",
            where=asked.key,
            got=f"HTTP {status}",
            cure="run `hf auth login`, or set HF_TOKEN, with a token that has read access to it",
        )
    return MissingError(
        f"the hub failed to deliver the {name.what} {name}",
        where=asked.key,
        got=f"HTTP {status} from {_endpoint()}",
        cure=f"{asked.fetch} later; it resumes the download",
    )


def _no_hub(name: HubName, asked: AskedBy, got: str) -> MissingError:
    return MissingError(
        f"the server that answered for the {name.what} {name} is not a Hugging Face hub",
        where=asked.key,
        got=" ".join(f"{got} ({_endpoint()})".split())[:200],
        cure="check HF_ENDPOINT and the proxy",
    )


def _of_disk(error: OSError, name: HubName, asked: AskedBy) -> UserError:
    from huggingface_hub import constants

    if error.errno in DISK_FULL:
        return _no_room(Path(constants.HF_HUB_CACHE), str(error.strerror), "", asked)
    if error.errno is not None:
        return ModelFolderError(
            f"the {name.what} {name} cannot be saved ({error.strerror})",
            where=asked.key,
            got=str(error.filename or constants.HF_HUB_CACHE),
            wanted="a writable cache folder",
            cure="set HF_HOME to a folder that you can write",
        )
    return _not_whole(error, name, asked)


def _not_whole(error: Exception, name: HubName, asked: AskedBy) -> MissingError:
    return MissingError(
        f"the download of the {name.what} {name} is incomplete",
        where=asked.key,
        got=" ".join(str(error).split())[:200],
        cure=f"{asked.fetch}; it resumes the download",
    )


def _check_room(folder: Path, size_bytes: int, asked: AskedBy) -> None:
    """Raises ModelFolderError where the disk of the cache cannot hold `size_bytes`."""
    parent = next(above for above in folder.parents if above.exists())
    free_bytes = shutil.disk_usage(parent).free
    if free_bytes < size_bytes + SPARE_BYTES:
        raise _no_room(parent, f"{_size(free_bytes)} free", _size(size_bytes), asked)


def _no_room(where: Path, got: str, wanted: str, asked: AskedBy) -> ModelFolderError:
    return ModelFolderError(
        f"not enough free disk space in {where} for the download",
        where=asked.key,
        got=got,
        wanted=wanted,
        cure=f"free disk space, or set HF_HOME to a folder on another disk; {asked.fetch} resumes the download",
    )


def _is_here(file: Path, entry: HubFile) -> bool:
    return file.is_file() and file.stat().st_size == entry.size_bytes


def _is_same(file: Path, entry: HubFile) -> bool:
    """Whether a file that was just fetched has the hub's digest; without a digest its size decides."""
    if not _is_here(file, entry):
        return False
    git = hashlib.sha1(f"blob {entry.size_bytes}\0".encode(), usedforsecurity=False)
    digest = hashlib.sha256() if entry.sha256 else git
    with file.open("rb") as stream:
        while block := stream.read(BLOCK_BYTES):
            digest.update(block)
    return digest.hexdigest() == (entry.sha256 or entry.blob_id or digest.hexdigest())


def _drop(file: Path) -> None:
    """Remove a file from the cache, with the blob that it links to."""
    file.resolve().unlink(missing_ok=True)
    file.unlink(missing_ok=True)


def _size(size_bytes: int) -> str:
    for unit, factor in (("GB", 1e9), ("MB", 1e6)):
        if size_bytes >= factor / 10:
            return f"{size_bytes / factor:.1f} {unit}"
    return f"{size_bytes / 1e3:.1f} kB"

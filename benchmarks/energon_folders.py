"""Folders in both directions between this product and the real megatron-energon.

python benchmarks/energon_folders.py --peers FOLDER

--peers is a folder that pip --target filled with megatron-energon (it brings too many packages for the test suite: a
virtual file system, two storage clients, a YAML parser in C++). One folder is prepared by `energon prepare` and read
here; another is written by `data prepare --format webdataset` and read by Energon's own loader, by its order and by
random access; the captions and pixels of both are compared with what was put in. Prints what matches; exit code 1 if
something does not.
"""

import argparse
import io
import json
import os
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

import numpy as np

SAMPLES = 120
JOB = """
[data]
sources = ["none"]
[data.fields.image]
kind = "image"
size = 32
tokens = 4
"""
READ = """
import json, sys
from megatron.energon import WorkerConfig, get_loader, get_val_dataset, get_train_dataset
import numpy as np
found = {}
for make, how in ((get_train_dataset, dict(shuffle_buffer_size=None, max_samples_per_sequence=None, repeat=False)),
                  (get_val_dataset, {})):
    dataset = make(sys.argv[1], batch_size=1, worker_config=WorkerConfig(rank=0, world_size=1, num_workers=0),
                   image_decode="pilrgb", **how)
    for batch in get_loader(dataset):
        found[batch.caption[0]] = np.asarray(batch.image[0]).reshape(-1, 3)[0].tolist()
print(json.dumps(found))
"""


def picture(number: int) -> bytes:
    from PIL import Image

    stream = io.BytesIO()
    Image.new("RGB", (40, 40), colour(number)).save(stream, "PNG")
    return stream.getvalue()


def colour(number: int) -> tuple[int, int, int]:
    return (number * 37 % 256, number * 91 % 256, number * 53 % 256)


def write_shards(folder: Path) -> None:
    folder.mkdir()
    for shard in range(2):
        with tarfile.open(folder / f"shard-{shard:03}.tar", "w") as archive:
            for number in range(shard, SAMPLES, 2):
                for ending, raw in (("png", picture(number)), ("txt", f"picture {number}".encode())):
                    info = tarfile.TarInfo(f"{number:06}.{ending}")
                    info.size = len(raw)
                    archive.addfile(info, io.BytesIO(raw))


def run(code: str, *arguments: str, peers: str) -> str:
    path = os.pathsep.join([*(path for path in sys.path if path), peers])
    ran = subprocess.run(
        [sys.executable, "-c", code, *arguments], env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True
    )
    if ran.returncode:
        raise SystemExit(ran.stderr[-3000:])
    return ran.stdout.strip().splitlines()[-1] if ran.stdout.strip() else ""


def read_here(folder: Path, cache: Path) -> dict[str, list[int]]:
    from meshwright.data import prepare, training_stream
    from meshwright.job.data import Data

    fields = {"image": {"kind": "image", "size": 32, "tokens": 4}}
    data = Data(sources=(str(folder),), fields=fields, cache=str(cache), packing="none", validation_fraction=0.0)
    corpus = prepare(data, 300)
    windows = training_stream(corpus, data, 64, 0).parts[0]
    assert corpus.tokenizer is not None
    found = {}
    for window in range(len(windows)):
        sample = windows.read(window)
        assert sample.media is not None
        items = np.zeros((sample.media.plan.slots, 3, 32, 32), np.uint8)
        sample.media.fill(items)
        text = corpus.tokenizer.decode(sample.tokens_S[4 : sample.length - 1].tolist())
        found[text] = items[0, :, 16, 16].tolist()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peers", required=True)
    peers = parser.parse_args().peers
    expected = {f"picture {number}": list(colour(number)) for number in range(SAMPLES)}
    matches = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_shards(folder / "theirs")
        arguments = ["prepare", "--non-interactive", "--no-progress", "--split-parts", "train:shard-{000..001}.tar"]
        arguments += [
            "--sample-type",
            "CaptioningSample",
            "--field-map",
            json.dumps({"image": "png", "caption": "txt"}),
        ]
        energon = "from megatron.energon.cli.main import main; main()"
        run(energon, *arguments, str(folder / "theirs"), peers=peers)
        matches["prepared by energon, read here"] = read_here(folder / "theirs", folder / "cache") == expected

        (folder / "job.toml").write_text(JOB)
        shards = [str(path) for path in sorted((folder / "theirs").glob("*.tar"))]
        ours = str(folder / "ours")
        command = [
            sys.executable,
            "-m",
            "meshwright",
            "data",
            "prepare",
            *shards,
            "--out",
            ours,
            "--format",
            "webdataset",
        ]
        command += ["--fields", str(folder / "job.toml"), "--validation-fraction", "0.1"]
        subprocess.run(command, check=True)
        read = json.loads(run(READ, ours, peers=peers))
        matches["written here, read by energon"] = read == expected
        matches["written here, read here"] = len(read_here(Path(ours), folder / "cache2").keys() - expected.keys()) == 0
    for what, same in matches.items():
        print(f"{what}: {'the same captions and pixels' if same else 'DIFFERENT'}")
    raise SystemExit(0 if all(matches.values()) else 1)


if __name__ == "__main__":
    main()

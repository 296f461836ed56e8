"""Pictures and captions out of tars, decoded and resized: this loader next to megatron-energon and webdataset.

python benchmarks/media_loader.py [--samples 3000] [--steps 40] [--workers 2] [--peers FOLDER] [--out FILE]

All three read the same shards (JPEGs of 640 × 480 with a caption, prepared once by each in its own way) with the same
number of worker processes, shuffle them, keep the middle square at 224 × 224 and deliver batches of 32 with the pixels
as bytes or floats and the caption (the peers as text; this loader as tokens). The first batches, while workers start,
are not counted. Each runs in a process of its own, in turns, and the median of the turns is kept; samples per second of
processor time show what dedicated cores would give where other programs share them. --peers is a folder that pip
--target filled with megatron-energon and webdataset.

Then a run of this loader is stopped after some steps on one rank and continued by two and by four, with other numbers
of workers: the samples and pixels are compared with those of the run that was not stopped.
"""

import argparse
import hashlib
import io
import itertools
import json
import os
import resource
import statistics
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Iterator
from datetime import date
from pathlib import Path
from typing import Any

import numpy as np

BATCH, SIZE, WARM_BATCHES, SHARDS = 32, 224, 6, 8


def jpeg(number: int) -> bytes:
    from PIL import Image

    generator = np.random.default_rng(number)
    pixels = np.zeros((480, 640, 3), np.float32)
    for step, strength in ((80, 120), (20, 70), (4, 30)):
        grain = generator.random((480 // step, 640 // step, 3), np.float32) * strength
        pixels += np.kron(grain, np.ones((step, step, 1), np.float32))
    stream = io.BytesIO()
    Image.fromarray(pixels.clip(0, 255).astype(np.uint8)).save(stream, "JPEG", quality=90)
    return stream.getvalue()


def write_shards(folder: Path, samples: int) -> None:
    some = [jpeg(number) for number in range(100)]
    for shard in range(SHARDS):
        with tarfile.open(folder / f"shard-{shard:03}.tar", "w") as archive:
            for number in range(shard, samples, SHARDS):
                caption = f"picture {number} of the benchmark, in which nothing can be seen but noise".encode()
                for ending, raw in (("jpg", some[number % len(some)]), ("txt", caption)):
                    info = tarfile.TarInfo(f"{number:07}.{ending}")
                    info.size = len(raw)
                    archive.addfile(info, io.BytesIO(raw))


def job_data(folder: Path) -> Any:
    from meshwright.job.data import Data

    return Data(
        sources=tuple(map(str, sorted(folder.glob("*.tar")))),
        fields={"image": {"kind": "image", "size": SIZE, "tokens": 16}},
        items_per_sequence=1,
        packing="none",
        cache=str(folder / "cache"),
        validation_fraction=0.0,
    )


def stream_of(folder: Path) -> Any:
    from meshwright.data import prepare, training_stream

    data = job_data(folder)
    return training_stream(prepare(data, 300), data, 64, seed=0)


def ours(folder: Path, workers: int) -> Iterator[Any]:
    from meshwright.data import Loader

    loader = Loader(stream_of(folder), global_batch=BATCH, workers=workers, prefetch=4)
    for step in loader:
        yield step.batch.media.items_BK


def middle(image: Any) -> np.ndarray:
    """The middle square of a picture, as the peers' users write it."""
    from PIL import Image

    side = min(image.size)
    left, top = (image.width - side) // 2, (image.height - side) // 2
    box = (left, top, left + side, top + side)
    return np.asarray(image.convert("RGB").resize((SIZE, SIZE), Image.Resampling.BICUBIC, box=box)).transpose(2, 0, 1)


def webdataset(folder: Path, workers: int) -> Iterator[Any]:
    import torch
    import webdataset as wds

    shards = sorted(map(str, folder.glob("*.tar")))
    dataset = (
        wds.WebDataset(shards, shardshuffle=100, resampled=True)
        .shuffle(1000)
        .decode("pil")
        .to_tuple("jpg", "txt")
        .map_tuple(lambda image: torch.from_numpy(np.ascontiguousarray(middle(image))), lambda text: text)
        .batched(BATCH)
    )
    loader = wds.WebLoader(dataset, num_workers=workers, batch_size=None, prefetch_factor=4)
    for images, _ in loader:
        yield images


def energon(folder: Path, workers: int) -> Iterator[Any]:
    from dataclasses import dataclass

    import torch
    from megatron.energon import (
        Batch,
        CaptioningSample,
        DefaultTaskEncoder,
        WorkerConfig,
        get_savable_loader,
        get_train_dataset,
    )

    @dataclass
    class Encoded(CaptioningSample):
        pass

    class Encoder(DefaultTaskEncoder):  # type: ignore[misc]
        def encode_sample(self, sample: Any) -> Any:
            sample.image = torch.from_numpy(np.ascontiguousarray(middle(sample.image)))
            return sample

    dataset = get_train_dataset(
        str(folder),
        batch_size=BATCH,
        shuffle_buffer_size=1000,
        max_samples_per_sequence=100,
        worker_config=WorkerConfig(rank=0, world_size=1, num_workers=workers),
        task_encoder=Encoder(),
        image_decode="pil",
    )
    assert Batch is not None
    for batch in get_savable_loader(dataset, prefetch_factor=4):
        yield batch.image


SYSTEMS = {"meshwright": ours, "webdataset": webdataset, "megatron-energon": energon}


def processor_seconds() -> float:
    """Of this process and of those that it started and that still run."""
    ticks = 0
    for status in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = status.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if int(fields[2]) == os.getpgid(0) or int(status.parent.name) == os.getpid() or int(fields[1]) == os.getpid():
            ticks += int(fields[11]) + int(fields[12])
    return ticks / os.sysconf("SC_CLK_TCK")


def measure(system: str, folder: Path, workers: int, steps: int) -> dict[str, float]:
    """Samples per second, by the clock and by processor time of all processes."""
    import torch

    torch.set_num_threads(1)
    batches = SYSTEMS[system](folder, workers)
    for _ in range(WARM_BATCHES):
        next(batches)
    busy, started = processor_seconds(), time.perf_counter()
    for _ in range(steps):
        assert next(batches).shape[0] == BATCH
    elapsed, busy = time.perf_counter() - started, processor_seconds() - busy
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return {"samples_per_s": steps * BATCH / elapsed, "samples_per_cpu_s": steps * BATCH / busy, "peak_kib": peak}


def prepare_energon(folder: Path, peers: str) -> None:
    command = "from megatron.energon.cli.main import main; main()"
    arguments = ["prepare", "--non-interactive", "--no-progress", "--split-parts", "train:shard-.*\\.tar"]
    arguments[-1] = "train:" + "shard-{000..%03d}.tar" % (SHARDS - 1)  # noqa: UP031
    arguments += ["--sample-type", "CaptioningSample", "--field-map", '{"image": "jpg", "caption": "txt"}', str(folder)]
    subprocess.run([sys.executable, "-c", command, *arguments], check=True, env=environment(peers), capture_output=True)


def environment(peers: str) -> dict[str, str]:
    path = os.pathsep.join([*(path for path in sys.path if path), peers])
    return {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}


def run_in_turns(folder: Path, asked: argparse.Namespace) -> dict[str, Any]:
    systems = ["meshwright", *(["webdataset", "megatron-energon"] if asked.peers else [])]
    found: dict[str, list[dict[str, float]]] = {system: [] for system in systems}
    for turn in range(asked.turns):
        for system in systems:
            arguments = [__file__, "--one", system, "--folder", str(folder)]
            arguments += ["--workers", str(asked.workers), "--steps", str(asked.steps)]
            ran = subprocess.run(
                [sys.executable, *arguments], env=environment(asked.peers or ""), capture_output=True, text=True
            )
            if ran.returncode:
                print(f"{system} fails: {ran.stderr.strip().splitlines()[-1:]}", flush=True)
                continue
            found[system].append(json.loads(ran.stdout.strip().splitlines()[-1]))
            rates = found[system][-1]
            print(
                f"turn {turn}: {system:18} {rates['samples_per_s']:8.1f} samples/s "
                f"{rates['samples_per_cpu_s']:8.1f} per CPU second",
                flush=True,
            )
    return {
        system: {key: statistics.median(turn[key] for turn in turns) for key in turns[0]}
        for system, turns in found.items()
        if turns
    }


def digest(batches: list[Any]) -> list[str]:
    """A hash of every sample: its number, tokens and pixels."""
    found = []
    for batch in batches:
        for row in range(len(batch)):
            parts = (batch.sample_ids_B[row], batch.tokens_BS[row], batch.media.items_BK[row])
            found.append(hashlib.sha256(b"".join(part.numpy().tobytes() for part in parts)).hexdigest())
    return found


def resume_elsewhere(folder: Path, steps: int = 12, stop: int = 5) -> dict[str, bool]:
    """Whether a run continued on other numbers of ranks and workers reads what the whole run reads."""
    from meshwright.data import Loader

    stream = stream_of(folder)

    def read(count: int, **how: Any) -> list[Any]:
        loader = Loader(stream, global_batch=BATCH, **how)
        try:
            return [step.batch for step in itertools.islice(loader, count)]
        finally:
            loader.close()

    whole = digest(read(steps, workers=1))
    results = {}
    for ranks, workers in ((2, 1), (4, 2)):
        parts = [
            read(steps - stop, rank=rank, ranks=ranks, workers=workers, position=stop * BATCH) for rank in range(ranks)
        ]
        continued = digest([part[step] for step in range(steps - stop) for part in parts])
        same = continued == whole[stop * BATCH :]
        results[f"1 rank, stopped after {stop} steps, continued on {ranks} with {workers} workers each"] = same
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", type=int, default=3000)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--peers")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--one", choices=sorted(SYSTEMS), help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.one:
        os.setpgid(0, 0)
        print(json.dumps(measure(asked.one, asked.folder, asked.workers, asked.steps)), flush=True)
        os._exit(0)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_shards(folder, asked.samples)
        started = time.perf_counter()
        stream_of(folder)
        print(f"prepared {asked.samples} samples in {time.perf_counter() - started:.1f} s", flush=True)
        if asked.peers:
            prepare_energon(folder, asked.peers)
        results: dict[str, Any] = run_in_turns(folder, asked)
        results["resume"] = resume_elsewhere(folder)
    for peer in ("webdataset", "megatron-energon"):
        if peer in results:
            by = {
                kind: results["meshwright"][kind] / results[peer][kind]
                for kind in ("samples_per_s", "samples_per_cpu_s")
            }
            print(f"{by['samples_per_s']:.2f} × {peer} by the clock, {by['samples_per_cpu_s']:.2f} × by processor time")
    for how, same in results["resume"].items():
        print(f"{how}: {'the same samples and pixels' if same else 'DIFFERENT'}")
    results |= {"date": str(date.today()), "workers": asked.workers, "cores": os.cpu_count(), "samples": asked.samples}
    if asked.out:
        asked.out.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()

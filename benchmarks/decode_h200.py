"""Pictures and film decoded on the GPU (NVJPEG, NVDEC, DALI) and on the CPU: items per second and host CPU seconds.

python benchmarks/decode_h200.py [--pictures 2048] [--films 32] [--processes 16] [--out FILE]
python benchmarks/decode_h200.py --make films.mkv       # on a machine with PyAV: H.264 to take along
python benchmarks/decode_h200.py --film films.mkv …      # on one without

Both sides are the code that training uses: the same bytes, cut and resized to the same items. Pictures are JPEGs of
1280 × 720 with detail of several sizes; films are H.264 of 1280 × 720, of which 8 frames are taken. The CPU side has so
many processes, each decoding alone, as data workers do; the GPU side is one process. Host CPU seconds are those of all
processes together, per thousand items. The difference between both sides' items is printed in levels of 0 … 255.
PyNvVideoCodec is imported from the Python path; without it, or without H.264, only pictures are measured. Where DALI is
installed, pictures are also decoded by it: on the CPU by one process with as many threads as the other side has
processes, and on a GPU if there is one. Its wheel of 425 MB is too large to be carried to a machine without a network.
"""

import argparse
import io
import json
import multiprocessing
import os
import resource
import time
from datetime import date
from pathlib import Path
from typing import Any

import numpy as np
import torch

from meshwright.data.media.carried import EncodedItem, EncodedMedia
from meshwright.data.media.chance import Chance
from meshwright.data.media.damage import Damaged
from meshwright.data.media.film import sampled_numbers
from meshwright.data.media.gpu import GpuDecoder, cut_and_resized, gpu_decoder
from meshwright.data.media.pictures import cut_of, picture
from meshwright.job.data import Data
from meshwright.job.fields import ItemPlan

WIDTH, HEIGHT, SIZE, FRAMES, LENGTH = 1280, 720, 336, 8, 300
BATCH = 64
FIELDS = {
    "image": {"kind": "image", "size": SIZE, "tokens": 1, "crop": "random", "flip": True},
    "video": {"kind": "video", "size": SIZE, "tokens": 1, "frames": FRAMES},
}
DATA = Data(sources=("none",), fields=FIELDS, decode="gpu")


def scene(number: int) -> np.ndarray:
    """Pixels with detail of several sizes."""
    generator = np.random.default_rng(number)
    pixels = np.zeros((HEIGHT, WIDTH, 3), np.float32)
    for step, strength in ((80, 120), (20, 70), (4, 30)):
        grain = generator.random((HEIGHT // step, WIDTH // step, 3), np.float32) * strength
        pixels += np.kron(grain, np.ones((step, step, 1), np.float32))
    return pixels.clip(0, 255).astype(np.uint8)


def jpeg(number: int) -> bytes:
    from PIL import Image

    stream = io.BytesIO()
    Image.fromarray(scene(number)).save(stream, "JPEG", quality=90)
    return stream.getvalue()


def h264(number: int) -> bytes:
    """A film of a scene that moves."""
    import av

    stream, whole = io.BytesIO(), scene(number)
    with av.open(stream, "w", format="matroska") as container:
        video = container.add_stream("libx264", rate=30)
        video.width, video.height, video.pix_fmt = WIDTH, HEIGHT, "yuv420p"
        for shift in range(LENGTH):
            pixels = np.ascontiguousarray(np.roll(whole, shift * 4, axis=1))
            container.mux(video.encode(av.VideoFrame.from_ndarray(pixels, format="rgb24")))
        container.mux(video.encode())
    return stream.getvalue()


def picture_on_cpu(raw: bytes) -> int:
    return len(picture(raw, DATA.fields["image"], Chance(1)))


def film_on_cpu(raw: bytes) -> int:
    """Frames by PyAV as data workers take them, or by OpenCV where there is no PyAV."""
    return len(film_items(raw))


def film_items(raw: bytes) -> np.ndarray:
    field = DATA.fields["video"]
    try:
        import av  # noqa: F401
    except ImportError:
        return opencv_frames(raw)
    from meshwright.data.media.film import frames_of

    return frames_of(raw, field, Chance(None))


def opencv_frames(raw: bytes) -> np.ndarray:
    import tempfile

    import cv2

    cv2.setNumThreads(1)
    field = DATA.fields["video"]
    with tempfile.NamedTemporaryFile(dir="/dev/shm", suffix=".mkv") as file:
        file.write(raw)
        file.flush()
        reader = cv2.VideoCapture(file.name)
        count = int(reader.get(cv2.CAP_PROP_FRAME_COUNT)) or LENGTH
        numbers, items = sampled_numbers(count, FRAMES), []
        for number in range(max(numbers) + 1):
            if not reader.grab():
                raise Damaged("damaged", f"ends at frame {number}")
            if number in numbers:
                pixels = cv2.cvtColor(reader.retrieve()[1], cv2.COLOR_BGR2RGB)
                chw = torch.from_numpy(np.ascontiguousarray(pixels.transpose(2, 0, 1)))
                items.append(cut_and_resized(chw, cut_of(field, WIDTH, HEIGHT, Chance(None)), SIZE).numpy())
    return np.stack(items)


def cpu_seconds() -> float:
    parts = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(part.ru_utime + part.ru_stime for part in parts)


def one_thread() -> None:
    torch.set_num_threads(1)


def on_cpu(work: Any, raws: list[bytes], processes: int, items_each: int) -> dict[str, float]:
    """Items per second of so many processes; their CPU time is known when they have ended."""
    before = cpu_seconds()
    with multiprocessing.get_context("fork").Pool(processes, one_thread) as pool:
        pool.map(work, raws[:processes], chunksize=1)  # started, and their libraries loaded
        started = time.perf_counter()
        pool.map(work, raws, chunksize=4 if items_each == 1 else 1)
        elapsed = time.perf_counter() - started
        pool.close()
        pool.join()
    items = len(raws) * items_each
    spent = cpu_seconds() - before
    return {"items_per_s": items / elapsed, "host_cpu_s_per_1000": 1000 * spent / items, "seconds": elapsed}


def waiting_for(raws: list[bytes], field: int, count: int) -> EncodedMedia:
    plan = ItemPlan((3, SIZE, SIZE), 1, count)
    items = [
        EncodedItem(row, 0, field, raw, 0, count, 1 if field == 0 else None, 0, f"item {row}")
        for row, raw in enumerate(raws)
    ]
    return EncodedMedia(plan, torch.zeros(len(raws), count, 1, dtype=torch.int64), tuple(items))


def in_batches(decoder: GpuDecoder, raws: list[bytes], field: int, count: int) -> dict[str, float]:
    """Items per second of one process; a decoder returns when its items are there."""
    batch = BATCH if count == 1 else 4
    decoder.decode(waiting_for(raws[:batch], field, count))
    before, started = time.process_time(), time.perf_counter()
    for first in range(0, len(raws), batch):
        decoder.decode(waiting_for(raws[first : first + batch], field, count))
    elapsed, spent = time.perf_counter() - started, time.process_time() - before
    items = len(raws) * count
    return {"items_per_s": items / elapsed, "host_cpu_s_per_1000": 1000 * spent / items, "seconds": elapsed}


def dali_decoder(device: torch.device, threads: int) -> GpuDecoder | None:
    """DALI's pipeline as training uses it; None where it is not installed."""
    data = DATA.model_copy(update={"decode": "dali", "workers": threads, "fields": {"image": DATA.fields["image"]}})
    return gpu_decoder(data, device, print)


def difference(decoder: GpuDecoder, raws: list[bytes], field: int, count: int, cpu: np.ndarray) -> float:
    media, _ = decoder.decode(waiting_for(raws, field, count))
    gpu = (media.items_BK.cpu().numpy() * 0.5 + 0.5) * 255
    return float(np.abs(gpu - cpu).mean())


def report(name: str, found: dict[str, float]) -> None:
    print(
        f"{name:28} {found['items_per_s']:10.1f} items/s {found['host_cpu_s_per_1000']:10.2f} CPU s per 1000",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pictures", type=int, default=2048)
    parser.add_argument("--films", type=int, default=32)
    parser.add_argument("--processes", type=int, default=16)
    parser.add_argument("--make", type=Path)
    parser.add_argument("--film", type=Path)
    parser.add_argument("--out", type=Path)
    asked = parser.parse_args()
    if asked.make:
        asked.make.write_bytes(h264(0))
        print(f"{asked.make}: {asked.make.stat().st_size:,} bytes")
        return
    torch.set_num_threads(1)
    with multiprocessing.get_context("fork").Pool(asked.processes) as pool:
        some = pool.map(jpeg, range(min(64, asked.pictures)))
    pictures = [some[number % len(some)] for number in range(asked.pictures)]
    try:
        films = [asked.film.read_bytes() if asked.film else h264(0)] * asked.films if asked.films else []
    except ImportError:
        films = []
    print(
        f"{len(pictures)} JPEGs of {np.mean([len(raw) for raw in some]) / 1e3:.0f} kB, {len(films)} films", flush=True
    )
    results: dict[str, Any] = {"date": str(date.today()), "processes": asked.processes, "cores": os.cpu_count()}
    # Before anything touches CUDA, since a process that did cannot be forked.
    results["pictures, CPU"] = on_cpu(picture_on_cpu, pictures, asked.processes, 1)
    report("pictures, CPU", results["pictures, CPU"])
    if films:
        results["film, CPU"] = on_cpu(film_on_cpu, films, asked.processes, FRAMES)
        report("film, CPU", results["film, CPU"])
    cpu = np.stack([picture(raw, DATA.fields["image"], Chance(1)) for raw in some[:8]])[:, None]
    devices = ["cpu", "cuda:0"] if torch.cuda.is_available() else ["cpu"]
    for place in devices:
        dali = dali_decoder(torch.device(place), asked.processes)
        if dali is None:
            break
        name = f"pictures, DALI on {place}"
        results[name] = in_batches(dali, pictures, 0, 1)
        report(name, results[name])
        results[f"{name}, levels apart"] = difference(dali, some[:8], 0, 1, cpu)
        print(f"they differ by {results[f'{name}, levels apart']:.2f} levels on average")
    if torch.cuda.is_available():
        decoder = GpuDecoder(DATA, torch.device("cuda", 0))
        results["gpu"] = torch.cuda.get_device_name()
        results["pictures, NVJPEG"] = in_batches(decoder, pictures, 0, 1)
        report("pictures, NVJPEG", results["pictures, NVJPEG"])
        results["pictures, levels apart"] = difference(decoder, some[:8], 0, 1, cpu)
        print(f"pictures differ by {results['pictures, levels apart']:.2f} levels on average")
        if films:
            try:
                results["film, NVDEC"] = in_batches(decoder, films, 1, FRAMES)
                report("film, NVDEC", results["film, NVDEC"])
                results["film, levels apart"] = difference(decoder, films[:1], 1, FRAMES, film_items(films[0])[None])
                print(f"films differ by {results['film, levels apart']:.2f} levels on average")
            except ImportError as error:
                print(f"film is not measured on the GPU: {error}")
    if asked.out:
        asked.out.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()

"""The CUDA copy engine on simulated streams with a kernel of plain indexing that can be seen half done."""

from __future__ import annotations

from vtoken.device.cuda_copy import CudaCopyEngine
from vtoken.device.cuda_layout import keys_of, values_of
from vtoken.device.event_model import SimulatedStreams


def half_by_half(caches):
    """A launch that moves keys, then values; between the two anything else may run."""

    def launch(table, moves, count):
        src, dst = moves[:count].clone(), moves[count : 2 * count].clone()
        for half in (keys_of, values_of):
            for cache in caches.values():
                part, size = half(cache), cache.shape[2]
                part[dst // size, :, dst % size] = part[src // size, :, src % size]
            yield

    return launch


def simulated_engine(streams: SimulatedStreams, caches, kind=CudaCopyEngine, **settings):
    engine = kind(streams, launch=half_by_half(caches), **{"segments": 4, "moves_per_launch": 4, **settings})
    engine.bind(caches)
    engine.start()
    return engine

"""Measures axpb on this machine's GPU, for the samples next to this package. In the folder above:

rm -r tuning_data
STONEWARE_CACHE_DIR=$PWD/store python3 -m acme.tune
stoneware merge store/samples.sqlite3 --out tuning_data
"""

import torch
import triton

import stoneware as sw
from acme.axpb import axpb

COUNTS = (1 << 16, 1 << 20, 1 << 24)


def main() -> None:
    with sw.tuning("on_miss"):
        for count in COUNTS:
            x = torch.randn(count, device="cuda")
            out = torch.full_like(x, float("nan"))
            axpb[lambda meta: (triton.cdiv(count, meta["TILE"]),)](x, out, 2.5, -1.0, count)
            torch.testing.assert_close(out, x * 2.5 - 1.0)
            print(f"count={count}: {axpb.best_config}")


if __name__ == "__main__":
    main()

"""Instance types: the catalogue, and price lists people bring."""

from __future__ import annotations

import gzip
import os
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from stretto.core.errors import InputError
from stretto.pricing.instances import CATALOGUE, Instance, find_instance
from stretto.pricing.price_list import make_instance, read_price_list

DATA = Path(os.environ.get("STRETTO_DATA", Path(__file__).parents[3] / "shared" / "data"))


class TestCatalogue:
    @pytest.mark.parametrize(
        ("name", "gpus", "usd_per_hour"),
        [("p3.2xlarge", 1, 3.06), ("p3.8xlarge", 4, 12.24), ("p3.16xlarge", 8, 24.48)],
    )
    def test_published_prices(self, name: str, gpus: int, usd_per_hour: float) -> None:
        found = find_instance(name)
        assert (found.gpus, found.usd_per_hour, found.gpu_type) == (gpus, usd_per_hour, "V100")

    def test_names_are_unique_and_figures_sane(self) -> None:
        assert len({instance.name for instance in CATALOGUE}) == len(CATALOGUE) >= 25
        for instance in CATALOGUE:
            assert 0.3 < instance.usd_per_hour / instance.gpus < 20.0
            assert instance.speed == 1.0, "a relative speed is a measurement"

    def test_ones_own_price_wins(self) -> None:
        own = Instance(name="p3.8xlarge", gpus=4, usd_per_hour=1.0)
        assert find_instance("p3.8xlarge", own=[own]) is own

    def test_an_unknown_name_is_answered_with_a_close_one(self) -> None:
        with pytest.raises(InputError, match=r"Did you mean p3\.8xlarge") as caught:
            find_instance("p3.8xlage", where="study.toml: cluster.instances")
        assert caught.value.where == "study.toml: cluster.instances"

    @pytest.mark.parametrize(("cloud", "region"), [("aws", "us-east-1"), ("lambda", "us-east-1")])
    def test_figures_are_those_of_the_price_data(self, cloud: str, region: str) -> None:
        path = DATA / "cloud_prices" / "gpu_catalog" / f"{cloud}.csv.gz"
        if not path.exists():
            pytest.skip(f"no price data at {path}; set STRETTO_DATA to the folder that has it")
        lines = [line.split(",") for line in gzip.decompress(path.read_bytes()).decode().splitlines()]
        prices = {
            cells[0]: (float(cells[2]), float(cells[5])) for cells in lines if region in cells and cells[2]
        }
        compared = [one for one in CATALOGUE if one.name in prices]
        assert len(compared) >= 4
        for instance in compared:
            assert (instance.gpus, instance.usd_per_hour) == pytest.approx(prices[instance.name], rel=1e-5)


def write(folder: Path, text: str | bytes) -> Path:
    path = folder / "prices.csv"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return path


class TestPriceList:
    def test_columns_in_any_order(self, tmp_path: Path) -> None:
        path = write(tmp_path, "gpus,instance,gpu_type,usd_per_hour\n4, box ,V100,9.5\n\n8,rack,,0\n")
        assert read_price_list(path) == (
            Instance(name="box", gpus=4, usd_per_hour=9.5, gpu_type="V100"),
            Instance(name="rack", gpus=8, usd_per_hour=0.0),
        )

    @pytest.mark.parametrize(
        ("text", "line", "words"),
        [
            ("", 1, "no column instance"),
            ("instance,gpus\n", 1, "no column usd_per_hour"),
            ("instance,gpus,usd_per_hour,colour\na,1,1,red\n", 1, "not known"),
            ("instance,gpus,gpus,usd_per_hour\na,1,1,1\n", 1, "twice"),
            ("instance,gpus,usd_per_hour\na,1\n", 2, "2 cells"),
            ("instance,gpus,usd_per_hour\na,0,1\n", 2, "gpus 0.0"),
            ("instance,gpus,usd_per_hour\n\na,2.5,1\n", 3, "gpus 2.5"),
            ("instance,gpus,usd_per_hour\na,4,-1\n", 2, "usd_per_hour -1"),
            ("instance,gpus,usd_per_hour\na,4,nan\n", 2, "usd_per_hour 'nan'"),
            ("instance,gpus,usd_per_hour\na,4,1e999\n", 2, "usd_per_hour inf"),
            ("instance,gpus,usd_per_hour\na,4,\n", 2, "usd_per_hour ''"),
            ("instance,gpus,usd_per_hour\n,4,1\n", 2, "name ''"),
            ("instance,gpus,usd_per_hour\na,4,1\na,8,2\n", 3, "a price already"),
            ('instance,gpus,usd_per_hour\n"a,4,1\n', 2, "not CSV"),
            ("instance,gpus,usd_per_hour,speed\na,4,1,0\n", 2, "speed 0"),
        ],
    )
    def test_errors_name_line_and_value(self, tmp_path: Path, text: str, line: int, words: str) -> None:
        path = write(tmp_path, text)
        with pytest.raises(InputError, match=words) as caught:
            read_price_list(path)
        assert caught.value.where == f"{path}:{line}"
        assert caught.value.remedy

    @pytest.mark.parametrize("content", [b"\xff\xfe", b"instance,gpus,usd_per_hour\n"])
    def test_a_file_without_prices(self, tmp_path: Path, content: bytes) -> None:
        with pytest.raises(InputError):
            read_price_list(write(tmp_path, content))

    def test_no_such_file(self, tmp_path: Path) -> None:
        with pytest.raises(InputError, match="cannot be read"):
            read_price_list(tmp_path / "none.csv")

    @settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
    @given(st.text(alphabet='abc,"\n01.e-\x00', max_size=40))
    def test_whatever_the_file_no_traceback(self, tmp_path: Path, text: str) -> None:
        path = write(tmp_path, "instance,gpus,usd_per_hour\n" + text)
        refused = ""
        try:
            assert read_price_list(path)
        except InputError as error:
            refused = error.where
        assert not refused or str(path) in refused


class TestTables:
    def test_one_of_your_own(self) -> None:
        values = {"name": "box", "gpus": 8, "usd_per_hour": 4, "speed": 1.5}
        assert make_instance(values, where="f") == Instance(name="box", gpus=8, usd_per_hour=4.0, speed=1.5)

    @pytest.mark.parametrize(
        ("values", "words"),
        [
            ({"gpus": 1, "usd_per_hour": 1}, "name is missing"),
            ({"name": "a", "gpus": 1, "usd_per_hour": 1, "price": 2}, "'price' is not known"),
            ({"name": "a", "gpus": True, "usd_per_hour": 1}, "gpus True"),
            ({"name": "a", "gpus": "4", "usd_per_hour": 1}, "gpus '4'"),
            ({"name": "a", "gpus": 1025, "usd_per_hour": 1}, "gpus 1025"),
            ({"name": "a", "gpus": 1, "usd_per_hour": float("nan")}, "usd_per_hour nan"),
            ({"name": "a", "gpus": 1, "usd_per_hour": 1, "gpu_type": 5}, "gpu_type 5"),
            ({"name": 7, "gpus": 1, "usd_per_hour": 1}, "name 7"),
        ],
    )
    def test_refused(self, values: dict[str, Any], words: str) -> None:
        with pytest.raises(InputError, match=words) as caught:
            make_instance(values, where="study.toml: cluster.instance[0]")
        assert caught.value.where == "study.toml: cluster.instance[0]"

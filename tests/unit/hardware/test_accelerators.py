"""Finding accelerators, on machines made of files."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from rlinf_core.errors import ConfigError
from rlinf_core.hardware.accelerators import (
    Accelerator,
    Amd,
    Ascend,
    Device,
    Host,
    Intel,
    Musa,
    Nvidia,
    accelerator_names,
    accelerator_of_model,
    find_accelerators,
    get_accelerator,
    register_accelerator,
    run_tool,
)

THREE_GPUS = """\
1, NVIDIA A800-SXM4-80GB, GPU-bbbb
0, NVIDIA A800-SXM4-80GB, GPU-aaaa
2, NVIDIA A800-SXM4-80GB, GPU-abcd
"""


@pytest.fixture
def machine(tmp_path: Path) -> Callable[..., Host]:
    """A host with the files given by path and text, and a vendor's tool that prints `output` (None: it fails)."""

    def make(files: dict[str, str], output: str | None = None) -> Host:
        for name, text in files.items():
            path = tmp_path / name.lstrip("/")
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)

        def run(command: Sequence[str]) -> str | None:
            return output

        return Host(tmp_path, run)

    return make


def test_nvidia_is_counted_by_its_tool(machine: Callable[..., Host]) -> None:
    devices = Nvidia().devices(machine({"/dev/nvidiactl": ""}, THREE_GPUS))
    assert [device.index for device in devices] == [0, 1, 2]
    assert devices[1] == Device(1, "NVIDIA A800-SXM4-80GB", "GPU-bbbb")


def test_nvidia_without_its_tool_is_counted_by_device_files(machine: Callable[..., Host]) -> None:
    host = machine(
        {
            "/dev/nvidiactl": "",
            "/dev/nvidia-uvm": "",
            "/dev/nvidia4": "",
            "/dev/nvidia10": "",
            "/proc/driver/nvidia/gpus/0000:1a:00.0/information": "Model: \t\t NVIDIA H200\nIRQ: 16\n",
            "/proc/driver/nvidia/gpus/0000:2b:00.0/information": "Model: NVIDIA H200\n",
        }
    )
    assert Nvidia().devices(host) == (Device(0, "NVIDIA H200"), Device(1, "NVIDIA H200"))


def test_nvidia_models_are_left_out_when_they_cannot_be_matched(machine: Callable[..., Host]) -> None:
    host = machine({"/dev/nvidiactl": "", "/dev/nvidia0": "", "/dev/nvidia1": ""})
    assert Nvidia().devices(host) == (Device(0), Device(1))


def test_the_tool_is_not_asked_on_a_machine_without_the_driver(tmp_path: Path) -> None:
    def never(command: Sequence[str]) -> str | None:
        raise AssertionError(f"{command} was run")

    assert Nvidia().devices(Host(tmp_path, never)) == ()


def test_amd_counts_gpus_and_not_processors(machine: Callable[..., Host]) -> None:
    nodes = "/sys/class/kfd/kfd/topology/nodes"
    files = {"/dev/kfd": "", f"{nodes}/0/properties": "cpu_cores_count 64\nsimd_count 0\n"}
    for node, minor in ((1, 128), (2, 129), (10, 130)):
        files[f"{nodes}/{node}/properties"] = f"simd_count 440\ndrm_render_minor {minor}\n"
        files[f"{nodes}/{node}/name"] = "gfx942\n"
    files |= {"/dev/dri/renderD128": "", "/dev/dri/renderD130": ""}  # this container was not given the second
    assert Amd().devices(machine(files)) == (Device(0, "gfx942"), Device(1, "gfx942"))


def test_ascend_and_musa_count_device_files(machine: Callable[..., Host]) -> None:
    host = machine(
        {
            "/dev/davinci4": "",
            "/dev/davinci5": "",
            "/dev/davinci_manager": "",
            "/dev/mtgpu.0": "",
            "/dev/mtgpu.1": "",
            "/dev/mtgpu.2": "",
        }
    )
    assert len(Ascend().devices(host)) == 2
    assert len(Musa().devices(host)) == 3


def test_intel_counts_cards_without_integrated_graphics(machine: Callable[..., Host], tmp_path: Path) -> None:
    host = machine({"/dev/dri/renderD128": "", "/dev/dri/renderD129": "", "/dev/dri/renderD130": ""})
    for minor, bus, vendor in (
        (128, "0000:00:02.0", "0x8086"),
        (129, "0000:3a:00.0", "0x8086"),
        (130, "0000:4b:00.0", "0x10de"),
    ):
        card = tmp_path / "sys/devices" / bus
        card.mkdir(parents=True)
        (card / "vendor").write_text(vendor + "\n")
        node = tmp_path / f"sys/class/drm/renderD{minor}"
        node.mkdir(parents=True)
        (node / "device").symlink_to(card)
    assert Intel().devices(host) == (Device(0),)


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (None, [0, 1, 2]),
        ("2,0", [2, 0]),
        ("", []),
        ("-1", []),
        ("1,9,0", [1]),
        ("0,0,1", []),  # listed twice: no device at all
        ("2,0,2,9", []),
        ("1,GPU-bb", []),  # the same one by its number and its UUID
        ("GPU-bb,GPU-bbbb", []),
        ("2,-1,2", [2]),  # nothing behind an invalid entry is read
        ("1gpu, +2", [1, 2]),  # numbers as `strtoul` reads them
        ("GPU-bb", [1]),
        ("GPU-a", []),  # two of them begin so
    ],
)
def test_visibility_hides_devices_as_the_runtime_does(
    machine: Callable[..., Host], value: str | None, expected: list[int]
) -> None:
    environ = {} if value is None else {"CUDA_VISIBLE_DEVICES": value}
    devices = Nvidia().available(machine({"/dev/nvidiactl": ""}, THREE_GPUS), environ)
    assert [device.index for device in devices] == expected


INSTANCES = """\
GPU 0: NVIDIA A800-SXM4-80GB (UUID: GPU-aaaa)
GPU 1: NVIDIA A800-SXM4-80GB (UUID: GPU-bbbb)
  MIG 3g.40gb     Device  0: (UUID: MIG-1b)
  MIG 3g.40gb     Device  1: (UUID: MIG-2b)
"""


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ("MIG-2b", ["MIG-2b"]),
        (" MIG-2b,MIG-1b", ["MIG-2b"]),  # a process sees one instance
        ("MIG-2b,0", ["MIG-2b"]),
        ("MIG-1b,MIG-1b", []),
        ("MIG-3c", []),
    ],
)
@pytest.mark.parametrize("listing", [INSTANCES, None])
def test_an_instance_of_mig_is_one_device(tmp_path: Path, value: str, expected: list[str], listing: str | None) -> None:
    (tmp_path / "dev").mkdir()
    (tmp_path / "dev/nvidiactl").touch()
    host = Host(tmp_path, lambda command: listing if "-L" in command else THREE_GPUS)
    devices = Nvidia().available(host, {"CUDA_VISIBLE_DEVICES": value})
    if listing is None and value == "MIG-3c":
        expected = [value]  # a tool that is silent refutes nothing
    assert [device.visible_id for device in devices] == expected
    assert {device.index for device in devices} <= {1 if listing else 0}


def test_a_process_is_given_an_instance_by_its_uuid(monkeypatch: pytest.MonkeyPatch) -> None:
    from rlinf_core.cluster import membership
    from rlinf_core.hardware.accelerators import Found

    instance = Device(0, "NVIDIA A800-SXM4-80GB", "MIG-1b", divided=True)
    monkeypatch.setattr(membership, "find_accelerators", lambda: Found(Nvidia(), (instance,)))
    info, _ = membership.probe()
    assert info.accelerator_ids == ("MIG-1b",)


def test_a_gpu_is_claimed_by_its_uuid_whatever_its_number(machine: Callable[..., Host]) -> None:
    host = machine({"/dev/nvidiactl": ""}, THREE_GPUS)
    by_number, by_uuid = (Nvidia().available(host, {"CUDA_VISIBLE_DEVICES": value}) for value in ("2", "GPU-abcd"))
    # A container that was given this one alone.
    inside = Nvidia().devices(machine({}, "0, NVIDIA A800-SXM4-80GB, GPU-abcd"))
    assert [one.identities for one in (*by_number, *by_uuid, *inside)] == [("GPU-abcd",)] * 3


@pytest.mark.parametrize(
    ("uuid", "expected"), [("GPU-abcd", ("GPU-abcd",)), ("GPU-????????-????", ("0",)), ("", ("0",))]
)
def test_a_gpu_without_its_tool_is_claimed_by_its_uuid(
    machine: Callable[..., Host], uuid: str, expected: tuple[str, ...]
) -> None:
    files = {"/dev/nvidiactl": "", "/dev/nvidia5": ""}
    files["/proc/driver/nvidia/gpus/0000:3a:00.0/information"] = f"Model: \t NVIDIA H200\nGPU UUID: \t {uuid}\n"
    (device,) = Nvidia().devices(machine(files))
    assert (device.identities, device.model) == (expected, "NVIDIA H200")


def test_a_gpu_with_instances_is_claimed_with_them(tmp_path: Path) -> None:
    """A process on it gets one of them, which another one may have by its UUID."""
    for name in ("dev/nvidiactl", "proc/driver/nvidia/capabilities/gpu1/mig/gi3/access"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    host = Host(tmp_path, lambda command: INSTANCES if "-L" in command else THREE_GPUS)
    whole = Nvidia().devices(host)
    assert [one.identities for one in whole] == [("GPU-aaaa",), ("GPU-bbbb", "MIG-1b", "MIG-2b"), ("GPU-abcd",)]
    (part,) = Nvidia().available(host, {"CUDA_VISIBLE_DEVICES": "MIG-2b"})
    assert part.identities == ("MIG-2b",)


def test_what_rocr_renumbers_is_claimed_as_the_same_gpu(machine: Callable[..., Host]) -> None:
    nodes = "/sys/class/kfd/kfd/topology/nodes"
    files = {"/dev/kfd": "", f"{nodes}/0/properties": "simd_count 0\n"}
    # Parts of one GPU have one number.
    files |= {f"{nodes}/{node}/properties": "simd_count 440\nunique_id 42\n" for node in (1, 2)}
    host = machine(files)
    first, second = Amd().devices(host)
    (shown,) = Amd().available(host, {"ROCR_VISIBLE_DEVICES": "1"})
    assert (shown.visible_id, shown.identities) == ("0", second.identities)
    assert first.identities != second.identities


@pytest.mark.parametrize(("vendor", "prefix"), [(Ascend(), "davinci"), (Musa(), "mtgpu.")])
def test_a_containers_device_is_claimed_by_its_file(
    machine: Callable[..., Host], vendor: Accelerator, prefix: str
) -> None:
    (device,) = vendor.devices(machine({f"/dev/{prefix}5": ""}))
    assert (device.visible_id, device.identities) == ("0", ("5",))


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({"HIP_VISIBLE_DEVICES": "0,0,2"}, ["gfx0", "gfx2"]),  # HIP passes over what it has
        ({"HIP_VISIBLE_DEVICES": "1, 2"}, ["gfx1"]),
        ({"HIP_VISIBLE_DEVICES": "02"}, []),
        ({"HIP_VISIBLE_DEVICES": "GPU-000000000000002c,0"}, ["gfx2", "gfx0"]),
        ({"ROCR_VISIBLE_DEVICES": "2,1,2,0"}, ["gfx2", "gfx1"]),  # ROCr stops there
        ({"ROCR_VISIBLE_DEVICES": "2,1", "HIP_VISIBLE_DEVICES": "1"}, ["gfx1"]),
        ({"ROCR_VISIBLE_DEVICES": "2", "HIP_VISIBLE_DEVICES": "2"}, []),
        ({"CUDA_VISIBLE_DEVICES": "2"}, ["gfx2"]),
        ({"CUDA_VISIBLE_DEVICES": "2", "HIP_VISIBLE_DEVICES": "0"}, ["gfx0"]),
    ],
)
def test_amd_reads_the_list_of_rocr_and_then_that_of_hip(
    machine: Callable[..., Host], variables: dict[str, str], expected: list[str]
) -> None:
    nodes = "/sys/class/kfd/kfd/topology/nodes"
    files = {"/dev/kfd": ""}
    for index in range(3):
        files[f"{nodes}/{index}/properties"] = f"simd_count 440\nunique_id {42 + index}\n"
        files[f"{nodes}/{index}/name"] = f"gfx{index}\n"
    devices = Amd().available(machine(files), variables)
    assert [device.model for device in devices] == expected
    if "ROCR_VISIBLE_DEVICES" in variables and "HIP_VISIBLE_DEVICES" not in variables:
        assert [device.visible_id for device in devices] == ["0", "1"]  # as HIP numbers them below it


@pytest.mark.parametrize(
    ("vendor", "value", "expected"),
    [
        (Ascend(), "1,2", [1, 2]),
        (Ascend(), "1, 2", [1]),  # CANN reads up to a blank
        (Ascend(), "0,2,8", [0, 2]),
        (Musa(), "2,2", []),
    ],
)
def test_other_vendors_read_their_variables(
    machine: Callable[..., Host], vendor: Accelerator, value: str, expected: list[int]
) -> None:
    host = machine({f"/dev/{name}{n}": "" for n in range(3) for name in ("davinci", "mtgpu.")})
    devices = vendor.available(host, {vendor.visibility_variable or "": value})
    assert [device.index for device in devices] == expected


def test_a_node_is_of_the_vendor_whose_devices_it_has(machine: Callable[..., Host]) -> None:
    accelerators = find_accelerators(machine({"/dev/davinci0": "", "/dev/davinci_manager": ""}), {})
    assert (accelerators.accelerator.name, len(accelerators.devices)) == ("Ascend", 1)


def test_a_node_without_devices_has_none(tmp_path: Path) -> None:
    accelerators = find_accelerators(Host(tmp_path), {})
    assert (accelerators.accelerator.name, accelerators.accelerator.visibility_variable, accelerators.devices) == (
        "none",
        None,
        (),
    )


def test_hidden_devices_make_a_node_without_accelerators(machine: Callable[..., Host]) -> None:
    host = machine({"/dev/nvidiactl": ""}, THREE_GPUS)
    assert find_accelerators(host, {"CUDA_VISIBLE_DEVICES": ""}).accelerator.name == "none"


def test_every_vendor_has_its_visibility_variable() -> None:
    assert {name: get_accelerator(name).visibility_variable for name in accelerator_names()} == {
        "NVIDIA": "CUDA_VISIBLE_DEVICES",
        "AMD": "HIP_VISIBLE_DEVICES",
        "Ascend": "ASCEND_RT_VISIBLE_DEVICES",
        "MUSA": "MUSA_VISIBLE_DEVICES",
        "Intel": "ZE_AFFINITY_MASK",
        "none": None,
    }


@pytest.mark.parametrize(
    ("model", "vendor"),
    [
        ("A800", "NVIDIA"),
        ("RTX 4090", "NVIDIA"),
        ("MI300X", "AMD"),
        ("910B", "Ascend"),
        ("MTT S4000", "MUSA"),
        ("Arc A770", "Intel"),
        (None, "NVIDIA"),
    ],
)
def test_a_declared_model_tells_its_vendor(model: str | None, vendor: str) -> None:
    assert accelerator_of_model(model).name == vendor


def test_unknown_vendor_is_answered_with_the_near_one() -> None:
    with pytest.raises(ConfigError, match="did you mean `NVIDIA`"):
        get_accelerator("nvidai")


class _Tpu(Accelerator):
    name = "TPU"
    visibility_variable = "TPU_VISIBLE_CHIPS"
    torch_device = "xla"

    def devices(self, host: Host) -> tuple[Device, ...]:
        return tuple(Device(number) for number in host.numbered("/dev", "accel"))


def test_a_vendor_can_be_added_once(monkeypatch: pytest.MonkeyPatch, machine: Callable[..., Host]) -> None:
    from rlinf_core.hardware import accelerators

    monkeypatch.setattr(accelerators, "_ACCELERATORS", dict(accelerators._ACCELERATORS))
    register_accelerator(_Tpu())
    assert find_accelerators(machine({"/dev/accel0": "", "/dev/accel1": ""}), {}).devices == (Device(0), Device(1))
    with pytest.raises(ConfigError, match="registered twice"):
        register_accelerator(_Tpu())


def test_a_tool_that_fails_hangs_or_is_missing_is_no_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    assert run_tool([sys.executable, "-c", "print('here')"]) == "here\n"
    assert run_tool([sys.executable, "-c", "raise SystemExit(3)"]) is None
    assert run_tool(["rlinf-test-no-such-tool"]) is None
    monkeypatch.setattr("rlinf_core.hardware.accelerators._LIMIT_S", 0.05)
    assert run_tool([sys.executable, "-c", "import time; time.sleep(30)"]) is None


def test_this_machine_can_be_asked() -> None:
    accelerators = find_accelerators()
    assert bool(accelerators.devices) == (accelerators.accelerator.name != "none")

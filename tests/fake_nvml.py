"""NVIDIA's management library for GPUs that are files: what a test writes there is what the driver says of them.

It has the functions that kit calls, and no others. A GPU that is told to ``block`` answers no call until it is told
otherwise, as a driver whose GPU is lost.
"""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

SOURCE = r"""
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
typedef struct { unsigned int gpu, memory; } Use;
typedef struct { unsigned long long total, free, used; } Memory;
typedef struct { char legacy[16]; unsigned int numbers[5]; char bus[32]; } Pci;
typedef struct { void *device; unsigned long long type, data; unsigned int gpu, compute; } Event;
static int started, watched;
static const unsigned long long BASE = 0x7f0000000000ull;

static FILE *opened(const char *name) {
  char path[4096];
  snprintf(path, sizeof path, "%s/%s", getenv("FAKE_NVML"), name);
  return fopen(path, "r");
}
static int told(void *device, const char *wanted, unsigned long long *value) {
  char name[16], key[64];
  unsigned long long each;
  int found;
  snprintf(name, sizeof name, "%llu", (unsigned long long)device - BASE);
  do {
    FILE *file = opened(name);
    int blocks = 0, lost = 0;
    found = 0;
    if (!started || !file) return 2;
    while (fscanf(file, "%63s %llu", key, &each) == 2) {
      if (!strcmp(key, wanted)) { *value = each; found = 1; }
      if (!strcmp(key, "block")) blocks = (int)each;
      if (!strcmp(key, "lost")) lost = (int)each;
    }
    fclose(file);
    if (lost) return 15;
    if (!blocks) return found ? 0 : 3;
    usleep(10000);
  } while (1);
}
static int number(void *device, const char *key, unsigned int *value) {
  unsigned long long found;
  int status = told(device, key, &found);
  if (!status) *value = (unsigned int)found;
  return status;
}
int nvmlInit_v2(void) { started = 1; return 0; }
int nvmlDeviceGetHandleByIndex_v2(unsigned int index, void **device) {
  unsigned long long ignored;
  int status = told((void *)(BASE + index), "", &ignored);
  if (status != 3) return status;
  *device = (void *)(BASE + index);
  return 0;
}
int nvmlDeviceGetIndex(void *device, unsigned int *index) {
  *index = (unsigned int)((unsigned long long)device - BASE);
  return 0;
}
int nvmlDeviceGetPciInfo_v3(void *device, Pci *pci) {
  snprintf(pci->bus, sizeof pci->bus, "00000000:%02llX:00.0", 0x3a + (unsigned long long)device - BASE);
  return 0;
}
int nvmlDeviceGetUtilizationRates(void *device, Use *use) { use->memory = 0; return number(device, "use", &use->gpu); }
int nvmlDeviceGetMemoryInfo(void *device, Memory *memory) {
  memory->total = 80ull << 30; memory->free = 0;
  return told(device, "memory", &memory->used);
}
int nvmlDeviceGetTemperature(void *device, int sensor, unsigned int *value) {
  return sensor ? 2 : number(device, "temperature", value);
}
int nvmlDeviceGetClockInfo(void *device, int kind, unsigned int *value) {
  return kind == 1 ? number(device, "clock", value) : 2;
}
int nvmlDeviceGetMaxClockInfo(void *device, int kind, unsigned int *value) {
  return kind == 1 ? number(device, "clock_max", value) : 2;
}
int nvmlDeviceGetCurrentClocksThrottleReasons(void *device, unsigned long long *value) {
  return told(device, "slow", value);
}
int nvmlDeviceGetPowerUsage(void *device, unsigned int *value) { return number(device, "power", value); }
int nvmlDeviceGetEnforcedPowerLimit(void *device, unsigned int *value) { return number(device, "limit", value); }
int nvmlDeviceGetTotalEccErrors(void *device, int kind, int counter, unsigned long long *value) {
  return kind == 1 && counter == 0 ? told(device, "ecc", value) : 2;
}
int nvmlEventSetCreate(void **events) { *events = (void *)&watched; return 0; }
int nvmlDeviceRegisterEvents(void *device, unsigned long long kinds, void *events) {
  return kinds == 8 && events == (void *)&watched ? 0 : 2;
}
int nvmlEventSetWait_v2(void *events, Event *event, unsigned int wait_ms) {
  if (events != (void *)&watched) return 2;
  for (unsigned int waited = 0; waited < wait_ms; waited += 10) {
    FILE *file = opened("xid");
    unsigned long long index, xid;
    if (file && fscanf(file, "%llu %llu", &index, &xid) == 2) {
      char path[4096];
      fclose(file);
      snprintf(path, sizeof path, "%s/xid", getenv("FAKE_NVML"));
      unlink(path);
      event->device = (void *)(BASE + index); event->type = 8; event->data = xid;
      return 0;
    }
    if (file) fclose(file);
    usleep(10000);
  }
  return 10;
}
"""
HEALTHY = {
    "use": 87, "memory": 40 << 30, "temperature": 61, "clock": 1755, "clock_max": 1980, "slow": 0, "power": 512_400,
    "limit": 700_000, "ecc": 0,
}  # fmt: skip


class FakeNvml:
    """Its GPUs and the kernel's log."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.log = folder / "kmsg"
        self.log.touch()

    def gpu(self, index: int, **changes: int | None) -> None:
        """What the driver says of a GPU; what is None it does not tell."""
        told = {name: value for name, value in {**HEALTHY, **changes}.items() if value is not None}
        draft = self.folder / f"draft{index}"
        draft.write_text("".join(f"{name} {value}\n" for name, value in told.items()))
        draft.replace(self.folder / str(index))

    def xid(self, index: int, number: int) -> None:
        """An Xid that the driver tells of."""
        draft = self.folder / "draft"
        draft.write_text(f"{index} {number}\n")
        draft.replace(self.folder / "xid")

    def kernel_says(self, message: str) -> None:
        """A line of the kernel's log."""
        with self.log.open("a") as file:
            file.write(f"4,1,5000000,-;{message}\n")


@pytest.fixture(scope="session")
def nvml_library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The library, compiled once."""
    folder = tmp_path_factory.mktemp("nvml")
    (folder / "nvml.c").write_text(SOURCE)
    library = folder / "libnvidia-ml.so.1"
    subprocess.run(["gcc", "-shared", "-fPIC", "-o", library, folder / "nvml.c"], check=True)
    return library


@pytest.fixture
def fake_nvml(nvml_library: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeNvml:
    """Two healthy GPUs, 0 and 1, at 0000:3a:00 and 0000:3b:00."""
    fake = FakeNvml(tmp_path)
    for index in (0, 1):
        fake.gpu(index)
    monkeypatch.setenv("NODEKIT_NVML", str(nvml_library))
    monkeypatch.setenv("FAKE_NVML", str(tmp_path))
    monkeypatch.setenv("NODEKIT_KMSG", str(fake.log))
    return fake

/* Two GPUs that answer as told: stands in for libnvidia-ml.so.1 under the real Python bindings.
 *
 * The environment variable VT_NVML holds words: "no_driver" (init fails), "lost1" (GPU 1 is lost), "mig" (GPU 0 is split
 * and has no utilisation), "unsupported" (nothing but memory is offered), "xid" (one critical event of GPU 0 waits).
 * If VT_NVML_FILE names a file, the words are read from it instead, at every call: a running process can be told.
 * Compiled with -DOLD_DRIVER some symbols are missing.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { OK = 0, NOT_SUPPORTED = 3, DRIVER_NOT_LOADED = 9, TIMEOUT = 10, GPU_IS_LOST = 15 };
typedef struct { int index; } Device;
static Device devices[2] = {{0}, {1}};
static int events_left = 1;

static int told(const char *word) {
    static char line[256];
    const char *path = getenv("VT_NVML_FILE"), *words = getenv("VT_NVML");
    if (path) {
        FILE *file = fopen(path, "r");
        line[0] = 0;
        if (file) {
            if (!fgets(line, sizeof line, file)) line[0] = 0;
            fclose(file);
        }
        words = line;
    }
    return words && strstr(words, word);
}

static int state(Device *device, int optional) {
    if (device->index == 1 && told("lost1")) return GPU_IS_LOST;
    return optional && told("unsupported") ? NOT_SUPPORTED : OK;
}

int nvmlInitWithFlags(unsigned flags) { (void)flags; return told("no_driver") ? DRIVER_NOT_LOADED : OK; }
int nvmlInit_v2(void) { return nvmlInitWithFlags(0); }
int nvmlShutdown(void) { return OK; }
const char *nvmlErrorString(int code) { (void)code; return "as told"; }
int nvmlDeviceGetCount_v2(unsigned *count) { *count = 2; return OK; }
int nvmlDeviceGetHandleByIndex_v2(unsigned index, Device **device) { *device = &devices[index]; return OK; }

int nvmlDeviceGetUUID(Device *device, char *uuid, unsigned length) {
    snprintf(uuid, length, "GPU-0000000%d-stand-in", device->index);
    return OK;
}

int nvmlDeviceGetMemoryInfo(Device *device, unsigned long long *memory) {
    memory[0] = 80ull << 30, memory[1] = 30ull << 30, memory[2] = 50ull << 30;
    return state(device, 0);
}

#ifndef OLD_DRIVER
typedef struct { unsigned version; unsigned long long total, reserved, free, used; } Memory2;
int nvmlDeviceGetMemoryInfo_v2(Device *device, Memory2 *memory) {
    memory->total = 80ull << 30, memory->reserved = 1ull << 30, memory->free = 30ull << 30, memory->used = 49ull << 30;
    return state(device, 0);
}
int nvmlDeviceGetRemappedRows(Device *device, unsigned *corrected, unsigned *uncorrected, unsigned *pending, unsigned *failed) {
    *corrected = 2, *uncorrected = 1, *pending = 1, *failed = 0;
    return state(device, 1);
}
int nvmlDeviceGetCurrentClocksThrottleReasons(Device *device, unsigned long long *reasons) {
    *reasons = 0x4 | 0x20;
    return state(device, 1);
}
#endif

int nvmlDeviceGetUtilizationRates(Device *device, unsigned *rates) {
    rates[0] = 75, rates[1] = 25;
    return told("mig") && device->index == 0 ? NOT_SUPPORTED : state(device, 1);
}
int nvmlDeviceGetTemperature(Device *device, int sensor, unsigned *celsius) {
    (void)sensor;
    *celsius = 61;
    return state(device, 1);
}
int nvmlDeviceGetMigMode(Device *device, unsigned *current, unsigned *pending) {
    *current = *pending = told("mig") && device->index == 0;
    return state(device, 1);
}
int nvmlDeviceGetPowerUsage(Device *device, unsigned *milliwatts) { *milliwatts = 412345; return state(device, 1); }
int nvmlDeviceGetEnforcedPowerLimit(Device *device, unsigned *milliwatts) { *milliwatts = 700000; return state(device, 1); }
int nvmlDeviceGetTotalEnergyConsumption(Device *device, unsigned long long *millijoules) {
    *millijoules = 5000000;
    return state(device, 1);
}
int nvmlDeviceGetClockInfo(Device *device, int clock, unsigned *megahertz) {
    *megahertz = clock == 1 ? 1980 : 2619;
    return state(device, 1);
}
int nvmlDeviceGetTotalEccErrors(Device *device, int error, int counter, unsigned long long *count) {
    (void)counter;
    *count = error == 0 ? 3 : 0;
    return state(device, 1);
}
int nvmlEventSetCreate(void **set) { *set = &events_left; return told("unsupported") ? NOT_SUPPORTED : OK; }
int nvmlDeviceRegisterEvents(Device *device, unsigned long long types, void *set) { (void)types, (void)set; return state(device, 1); }
typedef struct { Device *device; unsigned long long type, data; unsigned gpu, compute; } Event;
int nvmlEventSetWait_v2(void *set, Event *event, unsigned timeout_ms) {
    (void)set, (void)timeout_ms;
    if (!told("xid") || !events_left) return TIMEOUT;
    events_left = 0, event->device = &devices[0], event->type = 8, event->data = 79;
    return OK;
}

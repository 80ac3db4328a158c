/* A management library of our own, for the true binding to run against.

   It reads lines "NAME VALUE" from the file that FAKE_NVML names, at each call, so that a test can change what the GPUs
   do while they are sampled. A name is "count", "init", "gpu.QUANTITY" for every GPU or "gpuN.QUANTITY" for one, which
   goes before. A value "!CODE" makes the call return that code. With "hang 1" a call does not return until it is gone.
   Compiled with -DOLD it lacks what newer drivers have. */

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

typedef int code;
typedef struct { int index; int part; } device;

static device gpus[8] = {{0, -1}, {1, -1}, {2, -1}, {3, -1}, {4, -1}, {5, -1}, {6, -1}, {7, -1}};
static device parts[8][2];
static int told;

static int lookup(const char *name, char *value, size_t size) {
    char line[256], word[128], rest[128];
    int found = 0;
    FILE *file = fopen(getenv("FAKE_NVML"), "r");
    if (!file) return 0;
    while (fgets(line, sizeof line, file))
        if (sscanf(line, "%127s %127[^\n]", word, rest) == 2 && !strcmp(word, name)) {
            snprintf(value, size, "%s", rest);
            found = 1;
        }
    fclose(file);
    return found;
}

static void wait_while_hung(void) {
    char value[128];
    struct timespec pause = {0, 10000000};
    while (lookup("hang", value, sizeof value)) nanosleep(&pause, NULL);
}

/* 3 (not supported) where the file does not say. */
static code text_of(device *gpu, const char *quantity, char *value, size_t size) {
    char name[128], general[128];
    wait_while_hung();
    snprintf(name, sizeof name, "gpu%d.%s", gpu->index, quantity);
    snprintf(general, sizeof general, "gpu.%s", quantity);
    char lost[128], lost_name[128];
    snprintf(lost_name, sizeof lost_name, "gpu%d.lost", gpu->index);
    if (lookup(lost_name, lost, sizeof lost)) return 15;
    if (!lookup(name, value, size) && !lookup(general, value, size)) return 3;
    return value[0] == '!' ? atoi(value + 1) : 0;
}

static code number_of(device *gpu, const char *quantity, unsigned long long *value) {
    char text[128];
    code result = text_of(gpu, quantity, text, sizeof text);
    if (!result) *value = strtoull(text, NULL, 0);
    return result;
}

static code unsigned_of(device *gpu, const char *quantity, unsigned int *value) {
    unsigned long long number = 0;
    code result = number_of(gpu, quantity, &number);
    *value = (unsigned int)number;
    return result;
}

static unsigned int global(const char *name, unsigned int otherwise) {
    char value[128];
    return lookup(name, value, sizeof value) ? (unsigned int)strtoul(value, NULL, 0) : otherwise;
}

const char *nvmlErrorString(code result) { return "the test says so"; }
code nvmlInitWithFlags(unsigned int flags) { wait_while_hung(); return (code)global("init", 0); }
code nvmlShutdown(void) { return 0; }
code nvmlDeviceGetCount_v2(unsigned int *count) { *count = global("count", 0); return 0; }

code nvmlDeviceGetHandleByIndex_v2(unsigned int index, device **gpu) {
    unsigned int unused;
    *gpu = &gpus[index];
    code result = unsigned_of(*gpu, "handle", &unused);
    return result == 3 ? 0 : result;
}

code nvmlDeviceGetUUID(device *gpu, char *uuid, unsigned int size) {
    code result = text_of(gpu, "uuid", uuid, size);
    if (!result && gpu->part >= 0) snprintf(uuid, size, "MIG-%d-%d", gpu->index, gpu->part);
    return result;
}

code nvmlDeviceGetName(device *gpu, char *name, unsigned int size) {
    code result = text_of(gpu, "name", name, size);
    if (!result && gpu->part >= 0) strncat(name, " MIG 1g.10gb", size - strlen(name) - 1);
    return result;
}

code nvmlDeviceGetMemoryInfo(device *gpu, unsigned long long memory[3]) {
    code result = number_of(gpu, "memory_total", &memory[0]);
    if (!result) result = number_of(gpu, "memory_used", &memory[2]);
    if (gpu->part >= 0) memory[0] /= 8;
    return result;
}

code nvmlDeviceGetUtilizationRates(device *gpu, unsigned int rates[2]) {
    return gpu->part >= 0 ? 3 : unsigned_of(gpu, "utilisation", &rates[0]);
}

code nvmlDeviceGetTemperature(device *gpu, unsigned int sensor, unsigned int *value) {
    return unsigned_of(gpu, "temperature", value);
}

code nvmlDeviceGetTemperatureThreshold(device *gpu, unsigned int threshold, unsigned int *value) {
    return threshold == 1 ? unsigned_of(gpu, "slowdown_temperature", value) : 3;
}

code nvmlDeviceGetPowerUsage(device *gpu, unsigned int *value) { return unsigned_of(gpu, "power", value); }
code nvmlDeviceGetEnforcedPowerLimit(device *gpu, unsigned int *value) { return unsigned_of(gpu, "power_limit", value); }

code nvmlDeviceGetPowerManagementDefaultLimit(device *gpu, unsigned int *value) {
    return unsigned_of(gpu, "default_power_limit", value);
}

code nvmlDeviceGetClockInfo(device *gpu, unsigned int kind, unsigned int *value) {
    return kind == 1 ? unsigned_of(gpu, "sm_clock", value) : 3;
}

code nvmlDeviceGetMaxClockInfo(device *gpu, unsigned int kind, unsigned int *value) {
    return kind == 1 ? unsigned_of(gpu, "maximum_sm_clock", value) : 3;
}

code nvmlDeviceGetCurrentClocksThrottleReasons(device *gpu, unsigned long long *value) {
    return number_of(gpu, "reasons", value);
}

#ifndef OLD

code nvmlDeviceGetCurrentClocksEventReasons(device *gpu, unsigned long long *value) {
    return number_of(gpu, "reasons", value);
}

code nvmlDeviceGetCudaComputeCapability(device *gpu, int *major, int *minor) {
    unsigned long long number;
    code result = number_of(gpu, "compute_capability", &number);
    *major = (int)(number / 10);
    *minor = (int)(number % 10);
    return result;
}

code nvmlDeviceGetTotalEccErrors(device *gpu, unsigned int kind, unsigned int counter, unsigned long long *value) {
    return kind == 1 && counter == 0 ? number_of(gpu, "ecc", value) : 3;
}

code nvmlDeviceGetMaxPcieLinkGeneration(device *gpu, unsigned int *value) { return unsigned_of(gpu, "pcie", value); }
code nvmlDeviceGetMaxPcieLinkWidth(device *gpu, unsigned int *value) { return unsigned_of(gpu, "lanes", value); }

code nvmlDeviceGetNvLinkState(device *gpu, unsigned int link, unsigned int *active) {
    unsigned int links;
    code result = unsigned_of(gpu, "nvlinks", &links);
    *active = link < links;
    return !result && link >= 18 ? 2 : result;
}

code nvmlDeviceGetNvLinkVersion(device *gpu, unsigned int link, unsigned int *version) {
    return unsigned_of(gpu, "nvlink_version", version);
}

struct field { unsigned int id, scope; long long time, latency; int kind; code result; unsigned long long value; };

code nvmlDeviceGetFieldValues(device *gpu, int count, struct field *fields) {
    for (int i = 0; i < count; i++) {
        fields[i].value = 0;
        fields[i].result = fields[i].id == 90 ? number_of(gpu, "nvlink_speed", &fields[i].value) : 3;
    }
    return 0;
}

struct process { unsigned int pid; unsigned long long bytes; unsigned int instance, part; };

/* "PID BYTES", one process a GPU. */
code nvmlDeviceGetComputeRunningProcesses_v3(device *gpu, unsigned int *count, struct process *found) {
    char text[128];
    code result = text_of(gpu, "process", text, sizeof text);
    if (result == 3) { *count = 0; return 0; }
    if (result) return result;
    if (!found || *count < 1) { *count = 1; return 7; }
    *count = 1;
    memset(found, 0, sizeof *found);
    sscanf(text, "%u %llu", &found->pid, &found->bytes);
    return 0;
}

code nvmlDeviceGetMigMode(device *gpu, unsigned int *now, unsigned int *later) {
    *later = 0;
    return unsigned_of(gpu, "mig", now);
}

code nvmlDeviceGetMaxMigDeviceCount(device *gpu, unsigned int *count) { *count = 7; return 0; }

code nvmlDeviceGetMigDeviceHandleByIndex(device *gpu, unsigned int index, device **part) {
    if (index > 1) return 6;
    parts[gpu->index][index] = (device){gpu->index, (int)index};
    *part = &parts[gpu->index][index];
    return 0;
}

struct event { device *gpu; unsigned long long kind, data; unsigned int instance, part; };

code nvmlEventSetCreate(void **set) { *set = gpus; return 0; }
code nvmlDeviceRegisterEvents(device *gpu, unsigned long long kinds, void *set) { return 0; }

/* "xid CODE": once, on GPU 1. */
code nvmlEventSetWait_v2(void *set, struct event *event, unsigned int milliseconds) {
    unsigned int xid = global("xid", 0);
    if (!xid || told) return 10;
    told = 1;
    *event = (struct event){&gpus[1], 8, xid, 0, 0};
    return 0;
}

#endif

/* A libnvidia-ml.so.1 whose answers are scripted: the functions that tensor activity needs, as nvml.h has them.
 *
 * FAKE_NVML_SCRIPT names a file of lines; # begins a comment. GPU is an index, or * for all.
 *   gpus N                          devices, each with defaults
 *   name GPU TEXT                   device name
 *   activity GPU P P P ...          percent between the samples 1-2, 2-3, ...; the last one stays
 *   clock GPU MHZ MHZ ...           SM clock at the 1st, 2nd, ... time it is asked for; the last one stays
 *   cycles GPU ELAPSED ACTIVE MMA   growth of the counters from one sample to the next
 *   rates GPU ELAPSED ACTIVE MMA    in the place of cycles: their growth in a second of real time
 *   gpm GPU 0|1                     whether the device supports GPM
 *   mig GPU COUNT                   MIG mode with so many slices; COUNT 0: mode on, none made
 *   slice GPU SLICE P P ...         as activity, of one slice
 *   fail GPU FUNCTION CODE TIMES    the function answers CODE so many times; TIMES -1: always
 *   delay GPU FUNCTION MS           the function takes so long
 * FAKE_NVML_REPORT names a file that nvmlShutdown writes counts of calls to.
 * Compiled with NO_GPM it is a driver from before GPM: its functions are missing.
 */
#include <pthread.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#define GPUS 8
#define SLICES 7
#define VALUES 64
#define RULES 16

typedef struct { double value[VALUES]; int count; } series;
typedef struct { char function[64]; int code, times, delay_ms; } rule;
typedef struct device {
    int index, slice; /* slice -1: the whole GPU */
    char name[96], uuid[96], bus[32];
    series activity, clock;
    double cycles[3];
    int has_cycles, has_rates, gpm, mig, slices, asked_clock, taken;
    rule rules[RULES];
    int rule_count;
    struct device *parent, *part[SLICES];
} device;
typedef struct { device *of; int number; double at; } sample;
typedef struct { unsigned id; int status; double value; const char *names[3]; } metric;
typedef struct { unsigned version, count; sample *first, *second; metric metrics[]; } metrics_get;

static device gpu[GPUS];
static int gpus, inits, shutdowns, allocated, freed, too_soon;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

enum { OK, UNINITIALIZED, INVALID_ARGUMENT, NOT_SUPPORTED, NOT_FOUND = 6, INSUFFICIENT_SIZE = 7 };

static void pick(series *s, char *words) {
    s->count = 0;
    for (char *w = strtok(words, " \n"); w && s->count < VALUES; w = strtok(NULL, " \n"))
        s->value[s->count++] = atof(w);
}

static double at(const series *s, int i) { return s->count ? s->value[i < s->count ? i : s->count - 1] : 0.0; }

static void defaults(void) {
    gpus = 1;
    for (int i = 0; i < GPUS; i++) {
        device *d = &gpu[i];
        memset(d, 0, sizeof *d);
        d->index = i;
        d->slice = -1;
        d->gpm = 1;
        strcpy(d->name, "NVIDIA H100 80GB HBM3");
        sprintf(d->uuid, "GPU-00000000-0000-0000-0000-00000000000%d", i);
        sprintf(d->bus, "00000000:%02X:00.0", 16 + i);
        d->activity.count = d->clock.count = 1;
        d->activity.value[0] = 50;
        d->clock.value[0] = 1830;
    }
}

static device *make_slice(device *whole, int i) {
    device *d = calloc(1, sizeof *d);
    *d = *whole;
    d->slice = i;
    d->parent = whole;
    d->rule_count = 0;
    sprintf(d->name, "%.60s MIG 1g.10gb", whole->name);
    sprintf(d->uuid, "MIG-00000000-0000-0000-0000-0000000000%d%d", whole->index, i);
    return whole->part[i] = d;
}

static void apply(device *d, const char *key, char *rest) {
    char copy[512];
    snprintf(copy, sizeof copy, "%s", rest);
    rule *r = &d->rules[d->rule_count];
    if (!strcmp(key, "name")) sscanf(copy, " %95[^\n]", d->name);
    else if (!strcmp(key, "activity")) pick(&d->activity, copy);
    else if (!strcmp(key, "clock")) pick(&d->clock, copy);
    else if (!strcmp(key, "gpm")) d->gpm = atoi(copy);
    else if (!strcmp(key, "cycles"))
        d->has_cycles = sscanf(copy, "%lf %lf %lf", &d->cycles[0], &d->cycles[1], &d->cycles[2]) == 3;
    else if (!strcmp(key, "rates")) {
        d->has_cycles = d->has_rates
            = sscanf(copy, "%lf %lf %lf", &d->cycles[0], &d->cycles[1], &d->cycles[2]) == 3;
    } else if (!strcmp(key, "mig")) {
        d->mig = 1;
        d->slices = atoi(copy);
        for (int i = 0; i < d->slices && i < SLICES; i++) make_slice(d, i);
    } else if (!strcmp(key, "slice")) {
        char *end;
        int i = (int)strtol(copy, &end, 10);
        if (d->part[i]) pick(&d->part[i]->activity, end);
    } else if (!strcmp(key, "fail") && d->rule_count < RULES) {
        d->rule_count += sscanf(copy, "%63s %d %d", r->function, &r->code, &r->times) == 3;
    } else if (!strcmp(key, "delay") && d->rule_count < RULES) {
        d->rule_count += sscanf(copy, "%63s %d", r->function, &r->delay_ms) == 2;
    } else {
        fprintf(stderr, "fake nvml: bad line: %s %s\n", key, rest);
        abort();
    }
}

static void read_script(void) {
    const char *path = getenv("FAKE_NVML_SCRIPT");
    FILE *file = path ? fopen(path, "r") : NULL;
    char line[512], key[32], which[8];
    int used;
    if (!file) return;
    while (fgets(line, sizeof line, file)) {
        if (line[0] == '#' || sscanf(line, "%31s %7s%n", key, which, &used) < 2) continue;
        if (!strcmp(key, "gpus")) { gpus = atoi(which); continue; }
        for (int i = 0; i < GPUS; i++)
            if (which[0] == '*' || atoi(which) == i) apply(&gpu[i], key, line + used);
    }
    fclose(file);
}

/* What the script has a function do on a device: wait, and answer with an error. Slices share the rules. */
static int ruled(device *d, const char *function) {
    if (d->parent) d = d->parent;
    for (int i = 0; i < d->rule_count; i++) {
        rule *r = &d->rules[i];
        if (strcmp(r->function, function)) continue;
        if (r->delay_ms) { usleep(r->delay_ms * 1000); continue; }
        if (r->times == 0) continue;
        if (r->times > 0) r->times--;
        return r->code;
    }
    return OK;
}
#define RULED(d) do { int code = ruled((d), __func__); if (code) return code; } while (0)

int nvmlInitWithFlags(unsigned flags) {
    (void)flags;
    pthread_mutex_lock(&lock);
    if (inits == shutdowns) { defaults(); read_script(); }
    int code = ruled(&gpu[0], __func__);
    if (code == OK) inits++;
    pthread_mutex_unlock(&lock);
    return code;
}

int nvmlShutdown(void) {
    const char *path = getenv("FAKE_NVML_REPORT");
    FILE *file = path ? fopen(path, "w") : NULL;
    shutdowns++;
    if (file) {
        fprintf(file, "{\"inits\": %d, \"shutdowns\": %d, \"allocated\": %d, \"freed\": %d, \"too_soon\": %d}\n",
                inits, shutdowns, allocated, freed, too_soon);
        fclose(file);
    }
    return OK;
}

const char *nvmlErrorString(int code) { (void)code; return "error of the scripted library"; }

int nvmlDeviceGetCount_v2(unsigned *count) { *count = gpus; return inits > shutdowns ? OK : UNINITIALIZED; }

int nvmlDeviceGetHandleByIndex_v2(unsigned index, device **out) {
    if ((int)index >= gpus) return INVALID_ARGUMENT;
    RULED(&gpu[index]);
    *out = &gpu[index];
    return OK;
}

static int by_text(const char *text, size_t field, device **out) {
    for (int i = 0; i < gpus; i++) {
        if (!strcmp((char *)&gpu[i] + field, text)) { *out = &gpu[i]; return OK; }
        for (int j = 0; j < gpu[i].slices; j++)
            if (!strcmp((char *)gpu[i].part[j] + field, text)) { *out = gpu[i].part[j]; return OK; }
    }
    return NOT_FOUND;
}

int nvmlDeviceGetHandleByUUID(const char *uuid, device **out) {
    return by_text(uuid, offsetof(device, uuid), out);
}

int nvmlDeviceGetHandleByPciBusId_v2(const char *bus, device **out) {
    return by_text(bus, offsetof(device, bus), out);
}

static int copy_text(const char *text, char *out, unsigned length) {
    if (strlen(text) >= length) return INSUFFICIENT_SIZE;
    strcpy(out, text);
    return OK;
}

int nvmlDeviceGetName(device *d, char *out, unsigned length) { RULED(d); return copy_text(d->name, out, length); }
int nvmlDeviceGetUUID(device *d, char *out, unsigned length) { RULED(d); return copy_text(d->uuid, out, length); }

int nvmlDeviceGetClockInfo(device *d, int type, unsigned *mhz) {
    RULED(d);
    if (type != 1 || d->parent) return NOT_SUPPORTED; /* NVML_CLOCK_SM, and of whole devices only */
    *mhz = (unsigned)at(&d->clock, d->asked_clock++);
    return OK;
}

int nvmlDeviceGetMigMode(device *d, unsigned *current, unsigned *pending) {
    RULED(d);
    *current = *pending = d->mig;
    return OK;
}

int nvmlDeviceIsMigDeviceHandle(device *d, unsigned *is) { *is = d->parent != NULL; return OK; }
int nvmlDeviceGetMaxMigDeviceCount(device *d, unsigned *count) { (void)d; *count = SLICES; return OK; }

int nvmlDeviceGetMigDeviceHandleByIndex(device *d, unsigned index, device **out) {
    if (index >= SLICES || !d->part[index]) return NOT_FOUND;
    *out = d->part[index];
    return OK;
}

int nvmlDeviceGetDeviceHandleFromMigDeviceHandle(device *d, device **out) {
    if (!d->parent) return INVALID_ARGUMENT;
    *out = d->parent;
    return OK;
}

/* GPU instances are numbered from 7 on, so that an index taken for an id is found out. */
int nvmlDeviceGetGpuInstanceId(device *d, unsigned *id) {
    if (!d->parent) return INVALID_ARGUMENT;
    *id = 7 + d->slice;
    return OK;
}

#ifndef NO_GPM
static double now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec + t.tv_nsec * 1e-9;
}

int nvmlGpmQueryDeviceSupport(device *d, unsigned *support) {
    RULED(d);
    if (support[0] != 1) return INVALID_ARGUMENT;
    support[1] = d->gpm;
    return OK;
}

int nvmlGpmSampleAlloc(sample **out) {
    *out = calloc(1, sizeof **out);
    __sync_fetch_and_add(&allocated, 1);
    return OK;
}

int nvmlGpmSampleFree(sample *s) {
    free(s);
    __sync_fetch_and_add(&freed, 1);
    return OK;
}

static int take(device *d, sample *s) {
    s->of = d;
    s->number = d->taken++;
    s->at = now();
    return OK;
}

int nvmlGpmSampleGet(device *d, sample *s) {
    RULED(d);
    return d->mig ? NOT_SUPPORTED : take(d, s);
}

int nvmlGpmMigSampleGet(device *d, unsigned id, sample *s) {
    RULED(d);
    if (d->parent || id < 7 || id >= 7 + SLICES || !d->part[id - 7]) return INVALID_ARGUMENT;
    return take(d->part[id - 7], s);
}

int nvmlGpmMetricsGet(metrics_get *get) {
    sample *a = get->first, *b = get->second;
    if (get->version != 1 || !a->of || a->of != b->of || b->number != a->number + 1) return INVALID_ARGUMENT;
    RULED(a->of);
    if (b->at - a->at <= 0.1) { too_soon++; return INVALID_ARGUMENT; }
    for (unsigned i = 0; i < get->count; i++) {
        metric *m = &get->metrics[i];
        m->status = OK;
        if (m->id == 5) m->value = at(&a->of->activity, a->number);
        else if (m->id >= 248 && m->id <= 250 && a->of->has_cycles) {
            m->value = a->of->cycles[m->id - 248] * (a->of->has_rates ? b->at : b->number + 1);
        } else m->status = NOT_SUPPORTED;
    }
    return OK;
}
#endif

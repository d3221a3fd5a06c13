/* trainer.c: logistic regression in C, as one worker of a store that another process has made.
 *
 * Usage: trainer STORE DATA RANK. DATA is what train.py wrote: rows and columns (int32), then each row's
 * label and features (float). The store assigns the samples and says when to wait and when to end, by
 * the policy that its creator chose. The trainer needs to know nothing about the policy.
 */
#include <math.h>
#include <pyps.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

struct data {
    int32_t rows, columns;
    float *row; /* label and features of each */
};

static void must(int rc, const char *what) {
    if (rc == PYPS_OK) return;
    fprintf(stderr, "%s: %s: %s\n", what, pyps_error_name(rc), pyps_error_message());
    exit(1);
}

/* Whether the worker is still in the run. One that was too late for the others rejoins: its samples went back. */
static bool in_time(pyps_store *store, int rc, const char *what) {
    if (rc == PYPS_EFENCED) must(pyps_rejoin(store), "rejoin");
    else must(rc, what);
    return rc == PYPS_OK;
}

static struct data read_data(const char *path) {
    struct data d = {0};
    FILE *file = fopen(path, "rb");
    size_t floats = 0;
    if (file && fread(&d, sizeof d.rows, 2, file) == 2 && d.rows > 0 && d.columns > 0) {
        floats = (size_t)d.rows * (size_t)(d.columns + 1);
        d.row = malloc(floats * sizeof *d.row);
    }
    if (!d.row || fread(d.row, sizeof *d.row, floats, file) != floats) {
        fprintf(stderr, "%s: expected rows, columns and that many numbers\n", path);
        exit(2);
    }
    fclose(file);
    return d;
}

/* Adds the gradient of one sample's loss to that of `weights`, whose last is the bias. */
static void add_gradient(const struct data *d, const float *sample, const float *weights, float *gradient) {
    float sum = weights[d->columns];
    for (int32_t c = 0; c < d->columns; c++) sum += weights[c] * sample[1 + c];
    float error = 1 / (1 + expf(-sum)) - sample[0];
    for (int32_t c = 0; c < d->columns; c++) gradient[c] += error * sample[1 + c];
    gradient[d->columns] += error;
}

static void step(pyps_store *store, const struct data *d, const pyps_claim *claim, float *weights) {
    uint64_t version;
    uint32_t staging;
    if (!in_time(store, pyps_pull(store, weights, &version), "pull")) return;
    if (!in_time(store, pyps_stage(store, -1, &staging), "stage")) return;
    float *gradient = pyps_staging(store, staging);
    memset(gradient, 0, (size_t)(d->columns + 1) * sizeof *gradient);
    for (uint64_t i = 0; i < claim->count; i++) {
        uint64_t row = (claim->first + i) % (uint64_t)d->rows;
        add_gradient(d, d->row + row * (uint64_t)(d->columns + 1), weights, gradient);
    }
    pyps_hyper hyper = {.lr = 0.5f, .weight_decay = 1e-4f};
    pyps_push_args push = {.size = sizeof push,
                           .staging = staging,
                           .samples = claim->count,
                           .scale = 1.0f / (float)claim->count, /* the mean */
                           .timeout_seconds = -1,
                           .hyper = &hyper};
    pyps_push_result result;
    int rc = pyps_push(store, &push, &result);
    if (rc != PYPS_EREJECTED) in_time(store, rc, "push");
}

int main(int argc, char **argv) {
    if (argc != 4) {
        fprintf(stderr, "usage: trainer STORE DATA RANK\n");
        return 2;
    }
    struct data data = read_data(argv[2]);
    pyps_store *store;
    pyps_layout layout;
    must(pyps_open(argv[1], PYPS_ABI, &store), "open");
    must(pyps_get_layout(store, &layout), "layout");
    if (layout.parameters != (uint64_t)data.columns + 1) {
        fprintf(stderr, "the store has %llu parameters; expected %d, one a feature and the bias\n",
                (unsigned long long)layout.parameters, data.columns + 1);
        return 2;
    }
    float *weights = calloc(layout.flat_elements, sizeof *weights);
    must(pyps_join(store, PYPS_WORKER, atoi(argv[3]), NULL), "join");
    unsigned steps = 0;
    for (;; steps++) {
        pyps_claim claim;
        int rc = pyps_start(store, -1, &claim);
        if (rc == PYPS_EEND) break;
        if (in_time(store, rc, "start")) step(store, &data, &claim, weights);
    }
    printf("rank %s: %u steps\n", argv[3], steps);
    must(pyps_close(store), "close");
    free(weights), free(data.row);
    return 0;
}

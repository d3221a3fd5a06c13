/* common.h: what the C tests of the store share: a small store, a push, and ends that say why. */
#ifndef PYPS_TESTS_COMMON_H
#define PYPS_TESTS_COMMON_H

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "../../csrc/store/store.h"

static inline void must(int rc, const char *what) {
    if (!rc) return;
    fprintf(stderr, "%s: %s: %s\n", what, pyps_error_name(rc), pyps_error_message());
    exit(1);
}

#define CHECK(condition, ...)                                                                                \
    do {                                                                                                     \
        if (condition) break;                                                                                \
        fprintf(stderr, "%s:%d: ", __FILE__, __LINE__);                                                      \
        fprintf(stderr, __VA_ARGS__);                                                                        \
        fputc('\n', stderr);                                                                                 \
        exit(1);                                                                                             \
    } while (0)

static inline uint32_t policy_numbered(const char *name) {
    uint32_t number = 0;
    while (policy_find(number) && strcmp(policy_find(number)->name, name)) number++;
    return number;
}

/* A store of one tensor of zeros, `parameters` long, in chunks of 1024, with plain SGD unless changed. */
static inline pyps_config small_config(const pyps_tensor *tensor, const uint32_t *batches, uint32_t ranks,
                                       uint32_t policy) {
    return (pyps_config){
        .size = sizeof(pyps_config),
        .chunk_params = 1024,
        .max_participants = 8,
        .ranks = ranks,
        .groups = 1,
        .tensors = 1,
        .policy = policy,
        .policy_params =
            {.backup = 1, .bound = 2, .extra = 2, .slack = 1, .patience = 2, .scaling = PYPS_SCALE_NONE},
        .round_timeout_seconds = 60,
        .batches = batches,
        .tensor = tensor};
}

static pyps_hyper push_hyper = {.lr = 1};

/* One push of a gradient that is `value` everywhere, with the constants above; start's claim in full. */
static inline int push_value_by(pyps_store *s, float value, uint32_t codec, double seconds,
                                pyps_push_result *out) {
    pyps_claim claim;
    uint32_t staging;
    int rc = pyps_start(s, seconds, &claim);
    if (rc || (rc = pyps_stage(s, seconds, &staging))) return rc;
    float *gradient = pyps_staging(s, staging);
    for (uint64_t i = 0; i < store_elements(s); i++) gradient[i] = value;
    pyps_push_args args = {.size = sizeof args,
                           .staging = staging,
                           .samples = claim.count,
                           .scale = 1,
                           .timeout_seconds = seconds,
                           .codec = codec,
                           .error_feedback = codec != PYPS_F32,
                           .hyper = &push_hyper};
    return pyps_push(s, &args, out);
}

static inline int push_value(pyps_store *s, float value, uint32_t codec, pyps_push_result *out) {
    return push_value_by(s, value, codec, 10, out);
}

#endif

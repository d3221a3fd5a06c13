/* common.h: what the C tests of the store share: small stores, a push, cases by name, and ends that say why. */
#ifndef PYPS_TESTS_COMMON_H
#define PYPS_TESTS_COMMON_H

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "../../csrc/store/stores.h"

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

static inline void expect(int found, int code, const char *what) {
    CHECK(found == code, "%s: found %s (%s); expected %s", what, pyps_error_name(found), pyps_error_message(),
          pyps_error_name(code));
}

static inline uint32_t policy_numbered(const char *name) {
    uint32_t number = 0;
    const struct policy *found; /* none where a number is not used */
    while (number <= PYPS_QUORUM && (!(found = policy_find(number)) || strcmp(found->name, name))) number++;
    return number;
}

/* A store of one tensor of zeros, `parameters` long, in chunks of 1024, with plain SGD unless changed. */
static inline pyps_config small_config(const pyps_tensor *tensor, const uint32_t *batches, uint32_t ranks,
                                       uint32_t policy) {
    return (pyps_config){.size = sizeof(pyps_config),
                         .chunk_params = 1024,
                         .max_participants = 8,
                         .ranks = ranks,
                         .groups = 1,
                         .tensors = 1,
                         .policy = policy,
                         .policy_params = {.backup = 1,
                                           .splits = 1,
                                           .bound = 2,
                                           .extra = 2,
                                           .slack = 1,
                                           .patience = 2,
                                           .scaling = PYPS_SCALE_NONE},
                         .round_timeout_seconds = 60,
                         .batches = batches,
                         .tensor = tensor};
}

enum { PARAMETERS = 1000, FLAT = 1024 }; /* of a store of one chunk */

/* Such a store, in which every rank has batches of 4. */
static inline pyps_store *store_of_one_chunk(const char *name, uint32_t ranks, uint32_t policy,
                                             double round_timeout, uint32_t staging_buffers) {
    static const uint32_t batches[] = {4, 4, 4};
    pyps_tensor tensor = {.name = "w", .ndim = 1, .shape = {PARAMETERS}};
    pyps_config config = small_config(&tensor, batches, ranks, policy);
    config.round_timeout_seconds = round_timeout, config.staging_buffers = staging_buffers;
    pyps_store *s;
    must(pyps_create(name, PYPS_ABI, &config, &s), "create");
    return s;
}

static inline pyps_store *another_worker(const char *name) {
    pyps_store *s;
    must(pyps_open(name, PYPS_ABI, &s), "open");
    must(pyps_join(s, PYPS_WORKER, -1, NULL), "join");
    return s;
}

struct test_case {
    const char *name;
    void (*body)(void);
};

/* main() of a program whose argument is a case's name; none: prints all names. The case makes `segment`, whose name
 * is then removed. */
static inline int run_case(const struct test_case *cases, size_t count, const char *segment, int argc,
                           char **argv) {
    for (size_t i = 0; argc == 2 && i < count; i++)
        if (!strcmp(cases[i].name, argv[1])) {
            alarm(60);
            cases[i].body();
            must(pyps_unlink(segment, 0), "unlink");
            return 0;
        }
    for (size_t i = 0; i < count; i++) puts(cases[i].name);
    return argc == 1 ? 0 : 2;
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

/* fuzz_decode.c: encoded data of any bytes decodes, or is refused; nothing outside it is read or written.
 *
 * An input is {codec, mode, count}, then the data. Mode 0: as long as the input says; 1: filled with zeros or
 * cut to the length that is right for the count. What decodes must be finite where the codec's scales are
 * checked to be, and must encode and decode to itself again.
 */
#include <math.h>

#include "common.h"

#define MOST 4096u

void pyps_failpoint(const char *name) { (void)name; }

static void check_again(uint32_t codec, const float *values, uint64_t count, unsigned char *data,
                        uint64_t bytes) {
    static float again[MOST];
    pyps_encode_args args = {.size = sizeof args, .codec = codec, .scale = 1};
    pyps_encode_result result;
    if (pyps_encode(&args, values, count, data, bytes, &result)) return;
    must(pyps_decode(codec, data, bytes, again, count), "decode of what was encoded");
    for (uint64_t i = 0; codec <= PYPS_F16 && i < count; i++)
        CHECK(again[i] == values[i], "value %llu: found %g; expected %g", (unsigned long long)i,
              (double)again[i], (double)values[i]);
}

int LLVMFuzzerTestOneInput(const unsigned char *input, size_t size) {
    uint16_t count;
    if (size < 4) return 0;
    uint32_t codec = input[0], mode = input[1];
    memcpy(&count, input + 2, sizeof count);
    count %= MOST;
    uint64_t right = pyps_encoded_bytes(codec, count), bytes = mode % 2 ? right : size - 4;
    unsigned char *data = calloc(bytes + 4, 1); /* malloc's alignment, and its red zone right behind */
    float *values = malloc((count + !count) * sizeof *values);
    CHECK(data && values, "no memory");
    memcpy(data, input + 4, size - 4 < bytes ? size - 4 : bytes);
    int rc = pyps_decode(codec, data, bytes, values, count);
    CHECK(rc == PYPS_OK || rc == PYPS_EINVAL || rc == PYPS_ECORRUPT || rc == PYPS_ENONFINITE, "found code %d",
          rc);
    if (!right || bytes != right) CHECK(rc == PYPS_EINVAL || !count, "a wrong length: found code %d", rc);
    if (!rc && codec >= PYPS_INT8)
        for (uint16_t i = 0; i < count; i++) CHECK(!isnan(values[i]), "value %u is not a number", i);
    if (!rc) check_again(codec, values, count, data, bytes);
    free(data), free(values);
    return 0;
}

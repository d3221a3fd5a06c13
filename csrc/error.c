/* error.c: the names of the codes and the calling thread's last message. */
#include "error.h"

#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#include "pyps.h"

#define MOST_STRUCT 4096u /* what is larger is no size, but memory that was not set */

static _Thread_local char message[512];
static _Thread_local int last_code;

int pyps__fail(int code, const char *format, ...) {
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(message, sizeof message, format, arguments);
    va_end(arguments);
    return last_code = code;
}

int pyps__require(const void *pointer, const char *argument) {
    return pointer ? PYPS_OK : fail(PYPS_EINVAL, "%s: found NULL; expected a pointer", argument);
}

int pyps__between(const char *field, uint64_t found, uint64_t low, uint64_t high) {
    if (found >= low && found <= high) return PYPS_OK;
    return fail(PYPS_EINVAL, "%s: found %lu; expected %lu to %lu", field, found, low, high);
}

int pyps__read_struct(const char *what, const void *from, size_t least, void *to, size_t known) {
    uint32_t size = 0;
    if (!from) return fail(PYPS_EINVAL, "%s: found NULL; expected a pointer", what);
    memcpy(&size, from, sizeof size);
    if (size < least || size > MOST_STRUCT)
        return fail(PYPS_EINVAL, "%s: size: found %u; expected %zu", what, size, known);
    for (size_t i = known; i < size; i++)
        if (((const char *)from)[i])
            return fail(PYPS_EINVAL,
                        "%s: size: found %u, with a field that this version does not know; expected %zu",
                        what, size, known);
    memset(to, 0, known);
    memcpy(to, from, size < known ? size : known);
    return PYPS_OK;
}

const char *pyps_error_message(void) { return message; }

int pyps_error_code(void) { return last_code; }

uint32_t pyps_abi_version(void) { return PYPS_ABI; }

const char *pyps_error_name(int code) {
    static const char *const names[] = {
        "PYPS_OK",        "PYPS_EINVAL",   "PYPS_ESYS",       "PYPS_EEXIST",    "PYPS_ENOENT",
        "PYPS_ENOSPC",    "PYPS_ECORRUPT", "PYPS_EABI",       "PYPS_EPERM",     "PYPS_EFULL",
        "PYPS_ETIMEDOUT", "PYPS_EFENCED",  "PYPS_ESTALE",     "PYPS_EREJECTED", "PYPS_EFORKED",
        "PYPS_ENOTREADY", "PYPS_EBUSY",    "PYPS_EEND",       "PYPS_EPOLICY",   "PYPS_ENONFINITE",
        "PYPS_EPLAN",     "PYPS_EINTR",    "PYPS_EFALSELOOK",
    };
    int index = -code;
    if (index < 0 || index >= (int)(sizeof names / sizeof *names)) return "unknown pyps error";
    return names[index];
}

/* error.h: a negative code for the program, a message for the person, both set where the fact is known. */
#ifndef PYPS_ERROR_H
#define PYPS_ERROR_H

/* Sets this thread's message and returns `code`, so that a failure reads `return fail(PYPS_EINVAL, ...)`. */
int fail(int code, const char *format, ...) __attribute__((format(printf, 2, 3), cold));

#endif

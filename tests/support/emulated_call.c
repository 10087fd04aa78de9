// Calls functions of the C kernels by name with arguments from standard input, for an emulated x86-64 processor.
//
// In:  bytes of the name and the name; then the number of arguments; each is a kind and its content:
//      'i' int64, 'f' float, 'p' the size of a buffer and its bytes (no bytes: a null pointer).
// Out: the returned int64, then the bytes of each buffer. All sizes are int64.
// In the calling convention of x86-64 integers and floats are passed in registers of their own, so arguments of both
// kinds need no order between them, and a function ignores those that it does not have.
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef int64_t (*Function)(int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, int64_t,
                            int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, float, float);

#define NAME(name) extern void name(void);
#include "names.h"
#undef NAME

static const struct {
    const char *name;
    void (*function)(void);
} functions[] = {
#define NAME(name) {#name, name},
#include "names.h"
};

static void read_all(void *data, int64_t size) {
    if (size && fread(data, size, 1, stdin) != 1) exit(0);
}

static int64_t read_int(void) {
    int64_t value;
    read_all(&value, sizeof value);
    return value;
}

static Function find(const char *name) {
    for (size_t i = 0; i < sizeof functions / sizeof *functions; i++)
        if (strcmp(functions[i].name, name) == 0) return (Function)functions[i].function;
    fprintf(stderr, "there is no function %s\n", name);
    exit(1);
}

int main(void) {
    for (;;) {
        char name[64] = {0};
        read_all(name, read_int());
        int64_t number = read_int(), ints[16] = {0}, sizes[16], num_ints = 0, num_buffers = 0, num_floats = 0;
        void *buffers[16];
        float floats[2] = {0};
        for (int64_t i = 0; i < number; i++) {
            char kind;
            read_all(&kind, 1);
            if (kind == 'i') {
                ints[num_ints++] = read_int();
            } else if (kind == 'f') {
                read_all(&floats[num_floats++], sizeof(float));
            } else {
                int64_t size = read_int();
                void *data = size ? malloc(size) : NULL;
                read_all(data, size);
                sizes[num_buffers] = size;
                buffers[num_buffers++] = data;
                ints[num_ints++] = (int64_t)(intptr_t)data;
            }
        }
        int64_t result = find(name)(ints[0], ints[1], ints[2], ints[3], ints[4], ints[5], ints[6], ints[7], ints[8],
                                    ints[9], ints[10], ints[11], ints[12], ints[13], ints[14], ints[15], floats[0], floats[1]);
        fwrite(&result, sizeof result, 1, stdout);
        for (int64_t i = 0; i < num_buffers; i++) {
            if (sizes[i]) fwrite(buffers[i], sizes[i], 1, stdout);
            free(buffers[i]);
        }
        fflush(stdout);
    }
}

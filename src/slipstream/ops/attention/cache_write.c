// Copies the key and value of each token to its slot.
#include <stdint.h>
#include <string.h>

void slip_write_cache(const float *key, const float *value, float *keys, float *values, const int64_t *slots,
                      int64_t num_tokens, int64_t size, int64_t key_stride, int64_t value_stride) {
    for (int64_t token = 0; token < num_tokens; token++) {
        memcpy(keys + slots[token] * size, key + token * key_stride, size * sizeof(float));
        memcpy(values + slots[token] * size, value + token * value_stride, size * sizeof(float));
    }
}

/* The tokens of texts that grammars force. The tokenizer is a Python function, which needs the interpreter lock; the
   texts repeat, so their tokens are kept here. */

#include <pthread.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#define NUM_TEXTS 4096

typedef size_t (*Tokenize)(const void *user, const uint8_t *text, size_t size, uint32_t *tokens, size_t room);

typedef struct {
    uint8_t *text;
    size_t size;
    uint32_t *tokens;
    size_t num_tokens;
} Text;

typedef struct {
    Tokenize tokenize;
    pthread_mutex_t mutex;
    Text texts[NUM_TEXTS]; /* by hash */
} Texts;

/* Returns NULL if out of memory. */
Texts *slip_texts_open(Tokenize tokenize) {
    Texts *texts = calloc(1, sizeof(Texts));
    if (texts == NULL) return NULL;
    texts->tokenize = tokenize;
    pthread_mutex_init(&texts->mutex, NULL);
    return texts;
}

static void clear_text(Text *text) {
    free(text->text);
    free(text->tokens);
    memset(text, 0, sizeof(Text));
}

void slip_texts_close(Texts *texts) {
    for (size_t index = 0; index < NUM_TEXTS; index++) clear_text(&texts->texts[index]);
    pthread_mutex_destroy(&texts->mutex);
    free(texts);
}

static size_t copy_tokens(const uint32_t *from, size_t num, uint32_t *tokens, size_t room) {
    memcpy(tokens, from, (num < room ? num : room) * sizeof(uint32_t));
    return num;
}

/* As `Tokenize`, with the texts as user data. */
size_t slip_texts_tokenize(const void *user, const uint8_t *text, size_t size, uint32_t *tokens, size_t room) {
    Texts *texts = (Texts *)user;
    uint64_t hash = 14695981039346656037u;
    for (size_t index = 0; index < size; index++) hash = (hash ^ text[index]) * 1099511628211u;
    Text *own = &texts->texts[hash % NUM_TEXTS];
    pthread_mutex_lock(&texts->mutex);
    if (own->text != NULL && own->size == size && memcmp(own->text, text, size) == 0) {
        const size_t num = copy_tokens(own->tokens, own->num_tokens, tokens, room);
        pthread_mutex_unlock(&texts->mutex);
        return num;
    }
    pthread_mutex_unlock(&texts->mutex);
    Text made = {malloc(size), size, malloc(size * sizeof(uint32_t)), 0}; /* a token has at least one byte */
    if (size == 0 || made.text == NULL || made.tokens == NULL) {
        clear_text(&made);
        return size == 0 ? 0 : texts->tokenize(NULL, text, size, tokens, room);
    }
    memcpy(made.text, text, size);
    made.num_tokens = texts->tokenize(NULL, text, size, made.tokens, size);
    const size_t num = copy_tokens(made.tokens, made.num_tokens, tokens, room);
    if (num == 0) { /* it failed */
        clear_text(&made);
        return 0;
    }
    pthread_mutex_lock(&texts->mutex);
    Text old = *own;
    *own = made;
    pthread_mutex_unlock(&texts->mutex);
    clear_text(&old);
    return num;
}

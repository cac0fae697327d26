#include <pthread.h>
#include <stdbool.h>
#include <stdlib.h>

typedef void (*task_fn)(void *);

struct task {
	task_fn run;
	void *arg;
	struct task *next;
};

struct pool {
	pthread_mutex_t lock;
	pthread_cond_t ready;
	struct task *first, **last;
	bool closing;
};

static void *worker(void *arg)
{
	struct pool *pool = arg;

	for (;;) {
		pthread_mutex_lock(&pool->lock);
		while (pool->first == NULL && !pool->closing)
			pthread_cond_wait(&pool->ready, &pool->lock);
		struct task *t = pool->first;
		if (t == NULL) {
			pthread_mutex_unlock(&pool->lock);
			return NULL;
		}
		pool->first = t->next;
		if (pool->first == NULL)
			pool->last = &pool->first;
		pthread_mutex_unlock(&pool->lock);
		t->run(t->arg);
		free(t);
	}
}

int pool_submit(struct pool *pool, task_fn run, void *arg)
{
	struct task *t = malloc(sizeof(*t));

	if (t == NULL)
		return -1;
	*t = (struct task){ .run = run, .arg = arg };
	pthread_mutex_lock(&pool->lock);
	*pool->last = t;
	pool->last = &t->next;
	pthread_cond_signal(&pool->ready);
	pthread_mutex_unlock(&pool->lock);
	return 0;
}

#ifndef TIMER_H
#define TIMER_H

#include <stdint.h>

#define TIMER_BASE      0x40010000u
#define TIMER_CTRL      (*(volatile uint32_t *)(TIMER_BASE + 0x00))
#define TIMER_LOAD      (*(volatile uint32_t *)(TIMER_BASE + 0x04))
#define TIMER_STATUS    (*(volatile uint32_t *)(TIMER_BASE + 0x08))

#define CTRL_ENABLE     (1u << 0)
#define CTRL_PERIODIC   (1u << 1)
#define CTRL_IRQ        (1u << 2)
#define STATUS_EXPIRED  (1u << 0)

enum timer_mode {
	TIMER_ONE_SHOT,
	TIMER_PERIODIC,
};

/* Starts the timer; ticks is the number of clock cycles until it expires. */
static inline void timer_start(uint32_t ticks, enum timer_mode mode)
{
	TIMER_CTRL = 0;
	TIMER_STATUS = STATUS_EXPIRED;
	TIMER_LOAD = ticks;
	TIMER_CTRL = CTRL_ENABLE | CTRL_IRQ | (mode == TIMER_PERIODIC ? CTRL_PERIODIC : 0);
}

static inline int timer_expired(void)
{
	if (!(TIMER_STATUS & STATUS_EXPIRED))
		return 0;
	TIMER_STATUS = STATUS_EXPIRED;
	return 1;
}

#endif /* TIMER_H */

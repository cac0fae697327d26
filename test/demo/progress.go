// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"fmt"
	"io"
	"os"
	"sync"
	"time"
)

// progress prints a line for each step when the step ends. On a terminal, it also shows the seconds of the running
// step.
type progress struct {
	w        io.Writer
	start    time.Time
	terminal bool
	phases   []phase
	// served is the time when the first prompt was answered; zero before.
	served time.Time
}

type phase struct {
	name  string
	taken time.Duration
}

func newProgress(w *os.File) *progress {
	info, err := w.Stat()
	return &progress{w: w, start: time.Now(), terminal: err == nil && info.Mode()&os.ModeCharDevice != 0}
}

// step runs f as a named step. f may report what it is waiting for.
func (p *progress) step(ctx context.Context, name string, f func(report func(string)) error) error {
	begin := time.Now()
	var mu sync.Mutex
	detail := ""
	done := make(chan struct{})
	var ticker sync.WaitGroup
	if p.terminal {
		ticker.Go(func() {
			for {
				select {
				case <-done:
					return
				case <-time.After(200 * time.Millisecond):
					mu.Lock()
					fmt.Fprintf(p.w, "\r\033[K  ... %-36s %5.1f s  %.80s", name, time.Since(begin).Seconds(), detail)
					mu.Unlock()
				}
			}
		})
	}
	err := f(func(text string) {
		mu.Lock()
		defer mu.Unlock()
		if !p.terminal && text != detail {
			fmt.Fprintf(p.w, "      %s\n", text)
		}
		detail = text
	})
	close(done)
	ticker.Wait()
	if p.terminal {
		fmt.Fprint(p.w, "\r\033[K")
	}
	taken := time.Since(begin)
	p.phases = append(p.phases, phase{name, taken})
	if ctx.Err() != nil {
		err = errInterrupted
	}
	if err != nil {
		fmt.Fprintf(p.w, "FAIL  %-36s %5.1f s\n", name, taken.Seconds())
		return fmt.Errorf("%s: %w", name, err)
	}
	fmt.Fprintf(p.w, "  ok  %-36s %5.1f s\n", name, taken.Seconds())
	return nil
}

// title prints the title of an act.
func (p *progress) title(text string) { fmt.Fprintf(p.w, "\n%s\n\n", text) }

// firstAnswer records the time of the first answer. Later calls have no effect.
func (p *progress) firstAnswer(now time.Time) {
	if p.served.IsZero() {
		p.served = now
	}
}

func (p *progress) summary() {
	if !p.served.IsZero() {
		fmt.Fprintf(p.w, "\nThe first prompt was answered %.0f s after the start.\n", p.served.Sub(p.start).Seconds())
	}
	fmt.Fprintf(p.w, "\n%-40s %s\n", "Phase", "Seconds")
	for _, phase := range p.phases {
		fmt.Fprintf(p.w, "%-40s %7.1f\n", phase.name, phase.taken.Seconds())
	}
}

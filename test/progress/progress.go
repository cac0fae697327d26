// SPDX-License-Identifier: Apache-2.0

// Package progress prints the steps of the programs that show the project, test/demo and test/try.
package progress

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"sync"
	"time"
)

// Progress prints a line for each step when the step ends. On a terminal, it also shows the seconds of the running
// step.
type Progress struct {
	w io.Writer
	// Start is the time when the program started. Terminal is true if the output is a terminal.
	Start    time.Time
	Terminal bool
	phases   []phase
	// served is the time when the first prompt was answered; zero before.
	served time.Time
}

type phase struct {
	name  string
	taken time.Duration
}

// errInterrupted is the error of a step that Ctrl-C or a signal ends.
var errInterrupted = errors.New("interrupted")

// New returns a Progress that prints to w.
func New(w io.Writer) *Progress {
	p := &Progress{w: w, Start: time.Now()}
	if file, ok := w.(*os.File); ok {
		info, err := file.Stat()
		p.Terminal = err == nil && info.Mode()&os.ModeCharDevice != 0
	}
	return p
}

// Step runs f as a named step. f may report the state of the step, in one line on a terminal.
func (p *Progress) Step(ctx context.Context, name string, f func(report func(string)) error) error {
	begin := time.Now()
	var mu sync.Mutex
	detail := ""
	done := make(chan struct{})
	var ticker sync.WaitGroup
	if p.Terminal {
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
		if !p.Terminal && text != detail {
			fmt.Fprintf(p.w, "      %s\n", text)
		}
		detail = text
	})
	close(done)
	ticker.Wait()
	if p.Terminal {
		fmt.Fprint(p.w, "\r\033[K")
	}
	taken := time.Since(begin)
	p.phases = append(p.phases, phase{name, taken})
	if cause := context.Cause(ctx); cause == context.Canceled {
		err = errInterrupted
	} else if cause != nil {
		err = cause
	}
	if err != nil {
		fmt.Fprintf(p.w, "FAIL  %-36s %5.1f s\n", name, taken.Seconds())
		return fmt.Errorf("%s: %w", name, err)
	}
	fmt.Fprintf(p.w, "  ok  %-36s %5.1f s\n", name, taken.Seconds())
	return nil
}

// Title prints the title of a part.
func (p *Progress) Title(text string) { fmt.Fprintf(p.w, "\n%s\n\n", text) }

// FirstAnswer records the time of the first answer. Later calls have no effect.
func (p *Progress) FirstAnswer(now time.Time) {
	if p.served.IsZero() {
		p.served = now
	}
}

// Summary prints the time of each step.
func (p *Progress) Summary() {
	if !p.served.IsZero() {
		fmt.Fprintf(p.w, "\nThe first prompt was answered %.0f s after the start.\n", p.served.Sub(p.Start).Seconds())
	}
	fmt.Fprintf(p.w, "\n%-40s %s\n", "Phase", "Seconds")
	for _, phase := range p.phases {
		fmt.Fprintf(p.w, "%-40s %7.1f\n", phase.name, phase.taken.Seconds())
	}
}

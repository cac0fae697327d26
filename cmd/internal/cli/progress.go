// SPDX-License-Identifier: Apache-2.0

package cli

import (
	"fmt"
	"io"
	"os"
	"sync"

	"golang.org/x/sys/unix"
)

// ProgressBar shows one line of progress on a terminal, and nothing elsewhere.
type ProgressBar struct {
	out   io.Writer
	lock  sync.Mutex
	drawn bool
}

func NewProgressBar(out io.Writer) *ProgressBar {
	if file, ok := out.(*os.File); ok {
		if _, err := unix.IoctlGetTermios(int(file.Fd()), unix.TCGETS); err == nil {
			return &ProgressBar{out: out}
		}
	}
	return &ProgressBar{}
}

func (b *ProgressBar) Show(step string, done, total int) {
	if b.out == nil {
		return
	}
	b.lock.Lock()
	defer b.lock.Unlock()
	fmt.Fprintf(b.out, "\r\x1b[K%s: %d of %d", step, done, total)
	b.drawn = true
}

func (b *ProgressBar) Clear() {
	if b.drawn {
		fmt.Fprint(b.out, "\r\x1b[K")
	}
}

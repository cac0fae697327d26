// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bytes"
	"context"
	"math"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
	"time"

	"github.com/semmoe/operator/solver/cost"
	"github.com/semmoe/operator/solver/cost/hardware"
	"github.com/semmoe/operator/solver/trace"
	"github.com/semmoe/operator/test/processes"
	"github.com/semmoe/operator/test/programs"
	"github.com/semmoe/operator/test/tier"
)

func needPrograms(t *testing.T) {
	t.Helper()
	for _, name := range []string{"semmoe", "semmoe-refengine"} {
		_, err := programs.Built(name)
		tier.Require(t, err)
	}
}

// TestTry runs the whole program with few requests.
func TestTry(t *testing.T) {
	needPrograms(t)
	out := filepath.Join(t.TempDir(), "try")
	var output bytes.Buffer
	if err := run(t.Context(), options{out: out, requests: 120}, &output); err != nil {
		t.Fatalf("%v\n%s", err, output.String())
	}
	for _, want := range []string{`(?m)^Default, round-robin .* \d+ µs`, `(?m)^Plan  .* \d+ µs`, `120 of 120 answers are the same`, `Report: file://` + regexp.QuoteMeta(out) + `/report.html`} {
		if !regexp.MustCompile(want).MatchString(output.String()) {
			t.Errorf("the output does not match %q:\n%s", want, output.String())
		}
	}
	if page, err := os.ReadFile(filepath.Join(out, "report.html")); err != nil || !bytes.Contains(page, []byte("<html")) {
		t.Errorf("report: %v, %d bytes", err, len(page))
	}
	checkEnded(t, out)
}

// TestInterrupted cancels the run, as Ctrl-C does, while both routers serve.
func TestInterrupted(t *testing.T) {
	needPrograms(t)
	out := filepath.Join(t.TempDir(), "try")
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	err := run(ctx, options{out: out, requests: 60}, whenWritten{"two request routers serve", cancel})
	if err == nil || !strings.Contains(err.Error(), "interrupted") {
		t.Errorf("error %v, want interrupted", err)
	}
	checkEnded(t, out)
}

// whenWritten calls f when the text is written.
type whenWritten struct {
	text string
	f    func()
}

func (w whenWritten) Write(data []byte) (int, error) {
	if strings.Contains(string(data), w.text) {
		w.f()
	}
	return len(data), nil
}

// checkEnded fails if a program that has the directory in its arguments runs.
func checkEnded(t *testing.T, out string) {
	t.Helper()
	number, err := processes.Find(func(_ int, args []string) bool { return strings.Contains(strings.Join(args, " "), out) })
	if err != nil || number != 0 {
		t.Errorf("process %d still runs, %v", number, err)
	}
}

// TestEndedServer fails the run with the log of a server that ends by itself.
func TestEndedServer(t *testing.T) {
	needPrograms(t)
	ctx, cancel := context.WithCancelCause(t.Context())
	broken := &try{out: t.TempDir(), model: "missing", cancel: cancel}
	_, err := broken.startEngine(ctx, "engine")
	if want := "semmoe-refengine has ended: see " + broken.file("engine.log"); err == nil || err.Error() != want {
		t.Errorf("error %v, want %s", err, want)
	}
	if err := broken.stop(); err != nil {
		t.Error(err)
	}
}

// TestState counts the activations of two layers, of which the first one is dense.
func TestState(t *testing.T) {
	m := &trace.Model{Experts: 8, TopK: 2, Layers: []int{1, 2}, HiddenLayers: 3, HiddenSize: 64}
	layer := cost.LayerOf(m, cost.MachinesOf(hardware.DefaultProfile(), ranks, ranks), ranks, 2)
	a := newArm("", cost.DefaultPlacement(m.Layers, m.Experts, ranks), m, layer)
	if s := a.state(); s != (state{}) {
		t.Errorf("without a request: %+v", s)
	}
	// Each rank has one token. In layer 1 all activations are local. In layer 2 all go to rank 0, whose own are local.
	for rank := range ranks {
		a.count(rank, []int32{9, 9, int32(2 * rank), int32(2*rank + 1), 0, 1})
	}
	s := a.state()
	// The busiest rank receives 0 and 3 times its fair share, the slowest rank computes 1 and 4 times its share.
	if want := layer.Time(batchTokens, 1.5, 2.5).Total(); s.served != 4 || s.lar != 0.625 || math.Abs(s.micros-want) > 1e-9*want {
		t.Errorf("%+v, want 4 requests, 0.625 local and %v µs", s, want)
	}
}

func TestUntilEndsWithItsContext(t *testing.T) {
	ctx, cancel := context.WithTimeout(t.Context(), time.Millisecond)
	defer cancel()
	if err := until(ctx, func() (bool, error) { return false, nil }); err != context.DeadlineExceeded {
		t.Errorf("error %v", err)
	}
}

// SPDX-License-Identifier: Apache-2.0

package report

import (
	"bytes"
	"encoding/base64"
	"encoding/xml"
	"errors"
	"fmt"
	"io"
	"regexp"
	"strings"
	"testing"

	"github.com/semmoe/operator/solver"
	"github.com/semmoe/operator/solver/cost/hardware"
	"github.com/semmoe/operator/solver/placement"
)

// scheduled returns an input with a schedule in its plan, for ranks with the given memory.
func scheduled(t *testing.T, memoryBytes float64) Input {
	t.Helper()
	tr := generated()
	tr.Model.Config = `{"hidden_size":1024,"moe_intermediate_size":512,"num_attention_heads":8}`
	in := solved(t, tr, placement.DataParallel, 4, 0)
	machines, err := hardware.BuiltIn(hardware.Default)
	if err != nil {
		t.Fatal(err)
	}
	machines.MemoryBytes = memoryBytes
	if in.Plan.Schedule, err = solver.ScheduleLayers(&tr.Model, in.Plan, 0.5, machines, 0); err != nil || in.Plan.Schedule == nil {
		t.Fatalf("no schedule: %v", err)
	}
	return in
}

// TestSchedule verifies that the page has the figures of the schedules and a self-contained drawing.
func TestSchedule(t *testing.T) {
	in := scheduled(t, 100e9)
	page := string(rendered(t, built(t, in)))
	for _, want := range []string{
		"Schedule inside a layer", "<code>h200-nvlink</code>", "Attention and experts on separate ranks", "Attention and experts on the same ranks", "at most 16,384 tokens per attention rank",
	} {
		if !strings.Contains(page, want) {
			t.Errorf("the page does not have %q", want)
		}
	}
	for _, l := range in.Plan.Schedule.Disaggregated {
		want := fmt.Sprintf(`<tr><th scope="row">%s</th><td>%d</td><td>%d</td><td>%d</td><td>%d</td><td>%d</td><td>%s</td><td>%s</td>`, count(l.Sequence), l.AttentionRanks, l.ExpertRanks,
			l.Sizes.MicroBatches, l.Samples, l.Sizes.Chunks, l.OrderName, count(int(l.TokensPerSecond+0.5)))
		if !strings.Contains(page, want) {
			t.Errorf("the page does not have %q", want)
		}
	}
	for _, l := range in.Plan.Schedule.Shared {
		if want := fmt.Sprintf(`<tr><th scope="row">%s</th><td>%d</td><td>%s</td>`, count(l.TokensPerRank), l.Groups, l.Kernel); !strings.Contains(page, want) {
			t.Errorf("the page does not have %q", want)
		}
	}
	found := regexp.MustCompile(`src="data:image/svg\+xml;base64,([^"]*)" alt="Timeline of the first 2 MoE layers`).FindStringSubmatch(strings.ReplaceAll(page, "&#43;", "+"))
	if found == nil {
		t.Fatal("the page has no drawing")
	}
	drawing, err := base64.StdEncoding.DecodeString(found[1])
	if err != nil {
		t.Fatal(err)
	}
	bars := 0
	for d := xml.NewDecoder(bytes.NewReader(drawing)); ; {
		token, err := d.Token()
		if errors.Is(err, io.EOF) {
			break
		}
		if err != nil {
			t.Fatal(err)
		}
		if start, ok := token.(xml.StartElement); ok && start.Name.Local == "g" {
			bars++
		}
	}
	if bars < 8 {
		t.Errorf("%d bars, want at least 8 for two layers", bars)
	}
}

// TestMissingSchedule verifies that the schedule is shown without a trace, and that a page without a schedule or
// without memory for one has no drawing.
func TestMissingSchedule(t *testing.T) {
	in := scheduled(t, 100e9)
	in.Trace = nil
	if page := rendered(t, built(t, in)); !bytes.Contains(page, []byte("image/svg")) {
		t.Error("without a trace the schedule is missing")
	}
	in.Plan.Schedule = nil
	if page := rendered(t, built(t, in)); bytes.Contains(page, []byte("Schedule inside a layer")) {
		t.Error("the page of a plan without a schedule has one")
	}
	page := string(rendered(t, built(t, scheduled(t, 1))))
	if !strings.Contains(page, "the model does not fit into any split of the 4 ranks") || strings.Contains(page, "image/svg") {
		t.Error("the page does not report that the model does not fit")
	}
}

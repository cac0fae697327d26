// SPDX-License-Identifier: Apache-2.0

package calibration

import (
	"errors"
	"os"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
)

// TestParseMeasured parses a calibration of real GPUs.
func TestParseMeasured(t *testing.T) {
	data, err := os.ReadFile("testdata/h200x2.json")
	if err != nil {
		t.Fatal(err)
	}
	result, err := parse(data)
	if err != nil {
		t.Fatal(err)
	}
	if result.GPU != "NVIDIA H200" || result.World != 2 || result.Timing != "device" || result.Rows != 213 || result.Skipped != 0 || string(result.JSON) != string(data) {
		t.Errorf("%s, %d ranks, timing %s, %d rows, %d skipped", result.GPU, result.World, result.Timing, result.Rows, result.Skipped)
	}
}

func TestParseRejectsInvalidResults(t *testing.T) {
	for data, want := range map[string]string{
		`[]`:            "cannot unmarshal",
		`{"version":2}`: "version is 2, want 1",
		`{"version":1,"world":0,"gpu":"A","timing":"device"}`:                       "world is 0",
		`{"version":1,"world":2,"timing":"device"}`:                                 "gpu is empty",
		`{"version":1,"world":2,"gpu":"A","timing":"never"}`:                        `timing is "never", want device or host`,
		`{"version":1,"world":2,"gpu":"A","timing":"host","copy":7}`:                "copy: json",
		`{"version":1,"world":2,"gpu":"A","timing":"host","copy":[],"skipped":[1]}`: "there are no measurements, and 1 skipped",
	} {
		if result, err := parse([]byte(data)); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%s: %+v, %v; want %q", data, result, err, want)
		}
	}
}

const start = `{"event": "start", "measurements": 2, "gpu": "A", "world": 2}` + "\n"

// TestRead verifies that events are reported in order, and that other lines are ignored.
func TestRead(t *testing.T) {
	output := "=== some engine ===\n" + start +
		`{"event": "measured", "done": 1, "total": 2, "section": "copy", "us": 3.5}` + "\n{\n12\n" +
		`{"event": "skipped", "done": 2, "total": 2, "section": "gemm", "reason": "too little GPU memory"}` + "\n" +
		`{"event": "result", "calibration": {"version":1,"world":2,"gpu":"A","timing":"host","copy":[{}]}}` + "\n"
	var events []Event
	result, err := Read(strings.NewReader(output), func(e Event) { events = append(events, e) })
	if err != nil {
		t.Fatal(err)
	}
	want := []Event{
		{Event: "start", Measurements: 2, GPU: "A", World: 2},
		{Event: "measured", Done: 1, Total: 2, Section: "copy"},
		{Event: "skipped", Done: 2, Total: 2, Section: "gemm", Reason: "too little GPU memory"},
	}
	if diff := cmp.Diff(want, events); diff != "" {
		t.Error(diff)
	}
	if result.Rows != 1 || string(result.JSON) != `{"version":1,"world":2,"gpu":"A","timing":"host","copy":[{}]}` {
		t.Errorf("%+v", result)
	}
}

func TestReadFailures(t *testing.T) {
	ignore := func(Event) {}
	var script *scriptError
	if _, err := Read(strings.NewReader(start+`{"event": "error", "message": "no GPU"}`), ignore); !errors.As(err, &script) || script.Message != "no GPU" {
		t.Errorf("error of the script: %v", err)
	}
	if _, err := Read(strings.NewReader(start), ignore); !errors.Is(err, errUnfinished) {
		t.Errorf("truncated output: %v", err)
	}
	if _, err := Read(strings.NewReader(strings.Repeat("x", maxLine+1)), ignore); err == nil || !strings.Contains(err.Error(), "a line of more than") || errors.Is(err, errUnfinished) {
		t.Errorf("endless line: %v", err)
	}
}

// SPDX-License-Identifier: Apache-2.0

package calibration

import (
	"bufio"
	"encoding/json"
	"errors"
	"fmt"
	"io"
)

const (
	// version is the format version of the script's results.
	version = 1
	// maxLine limits the length of a line of the script's output, in bytes. The longest line, the result, has about 50
	// KiB.
	maxLine = 4 << 20
)

// Event is a line of the script's standard output.
type Event struct {
	// Event is start, measured, skipped, result or error.
	Event string `json:"event"`
	// Message describes an error. Reason explains why a measurement was skipped.
	Message string `json:"message"`
	Reason  string `json:"reason"`
	// Done is the number of finished measurements out of Total, and Section the section of the last one. Measurements
	// is the total in the start event.
	Done         int    `json:"done"`
	Total        int    `json:"total"`
	Measurements int    `json:"measurements"`
	Section      string `json:"section"`
	// GPU and World are the name and the number of the GPUs, in the start event.
	GPU   string `json:"gpu"`
	World int    `json:"world"`
	// Calibration is the result.
	Calibration json.RawMessage `json:"calibration"`
}

// scriptError is an error that the script reports.
type scriptError struct{ Message string }

func (e *scriptError) Error() string { return e.Message }

// errUnfinished reports an output that ends without a result.
var errUnfinished = errors.New("the script ended without a result")

// Read reads the script's output, passes its events to report, and returns the result, or a *scriptError. It ignores
// other lines, for example messages of the image's entrypoint.
func Read(output io.Reader, report func(Event)) (*Result, error) {
	lines := bufio.NewScanner(output)
	lines.Buffer(make([]byte, 64<<10), maxLine)
	for lines.Scan() {
		var event Event
		if json.Unmarshal(lines.Bytes(), &event) != nil || event.Event == "" {
			continue
		}
		switch event.Event {
		case "result":
			return parse(event.Calibration)
		case "error":
			return nil, &scriptError{event.Message}
		}
		report(event)
	}
	switch err := lines.Err(); {
	case errors.Is(err, bufio.ErrTooLong):
		return nil, fmt.Errorf("the output has a line of more than %d bytes, so it is not the output of the calibration script", maxLine)
	case err != nil:
		return nil, fmt.Errorf("%w: %w", errUnfinished, err)
	}
	return nil, errUnfinished
}

// Result is a calibration. Only its head is parsed here. The cost models parse the measurements.
type Result struct {
	// GPU is the name of the GPUs. World is the number of ranks, with one GPU each. Timing is "device" or "host".
	GPU    string
	World  int
	Timing string
	// Rows is the number of measurements, and Skipped the number of skipped measurements.
	Rows, Skipped int
	// JSON is the complete result, exactly as the script wrote it.
	JSON []byte
}

// sections are the names of the lists of measurements in a result.
var sections = []string{"all_to_all", "collectives", "send", "gate_up_gemm", "gemm", "attention", "attention_decode", "copy"}

// parse parses and validates a result.
func parse(data []byte) (*Result, error) {
	var head struct {
		Version int    `json:"version"`
		World   int    `json:"world"`
		GPU     string `json:"gpu"`
		Timing  string `json:"timing"`
		Skipped []any  `json:"skipped"`
	}
	if err := json.Unmarshal(data, &head); err != nil {
		return nil, fmt.Errorf("calibration: %w", err)
	}
	switch {
	case head.Version != version:
		return nil, fmt.Errorf("calibration: version is %d, want %d: use the script of this semmoe", head.Version, version)
	case head.World < 1:
		return nil, fmt.Errorf("calibration: world is %d, want at least 1", head.World)
	case head.GPU == "":
		return nil, errors.New("calibration: gpu is empty, want the name of the GPUs")
	case head.Timing != "device" && head.Timing != "host":
		return nil, fmt.Errorf("calibration: timing is %q, want device or host", head.Timing)
	}
	result := &Result{GPU: head.GPU, World: head.World, Timing: head.Timing, Skipped: len(head.Skipped), JSON: data}
	var all map[string]json.RawMessage
	if err := json.Unmarshal(data, &all); err != nil {
		return nil, fmt.Errorf("calibration: %w", err)
	}
	for _, section := range sections {
		var rows []json.RawMessage
		if raw, ok := all[section]; ok {
			if err := json.Unmarshal(raw, &rows); err != nil {
				return nil, fmt.Errorf("calibration: %s: %w", section, err)
			}
		}
		result.Rows += len(rows)
	}
	if result.Rows == 0 {
		return nil, fmt.Errorf("calibration: there are no measurements, and %d skipped ones; see the reasons in \"skipped\"", result.Skipped)
	}
	return result, nil
}

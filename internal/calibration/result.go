package calibration

import (
	"bufio"
	"encoding/json"
	"errors"
	"fmt"
	"io"
)

const (
	// version is that of the results that the script writes.
	version = 1
	// maxLine bounds a line of the script's output, in bytes: the result, its longest, has about 50 KiB.
	maxLine = 4 << 20
)

// Event is a line of the script's standard output.
type Event struct {
	// Event is start, measured, skipped, result or error.
	Event string `json:"event"`
	// Message says what is wrong; Reason why a measurement was left out.
	Message string `json:"message"`
	Reason  string `json:"reason"`
	// Done of Total measurements are over, the last one of Section. Measurements is the total at the start.
	Done         int    `json:"done"`
	Total        int    `json:"total"`
	Measurements int    `json:"measurements"`
	Section      string `json:"section"`
	// GPU and World tell at the start on what is measured: the GPU's name, and how many there are.
	GPU   string `json:"gpu"`
	World int    `json:"world"`
	// Calibration is the result.
	Calibration json.RawMessage `json:"calibration"`
}

// ScriptError is what the script says is wrong.
type ScriptError struct{ Message string }

func (e *ScriptError) Error() string { return e.Message }

// ErrUnfinished is the error of an output that ends before the script has told its result.
var ErrUnfinished = errors.New("the script has ended without a result")

// Read reads the script's output, tells the events of it, and returns the result, or a *ScriptError. Other lines, such as an image's
// start may write, are passed over.
func Read(output io.Reader, tell func(Event)) (*Result, error) {
	lines := bufio.NewScanner(output)
	lines.Buffer(make([]byte, 64<<10), maxLine)
	for lines.Scan() {
		var event Event
		if json.Unmarshal(lines.Bytes(), &event) != nil || event.Event == "" {
			continue
		}
		switch event.Event {
		case "result":
			return Parse(event.Calibration)
		case "error":
			return nil, &ScriptError{event.Message}
		}
		tell(event)
	}
	switch err := lines.Err(); {
	case errors.Is(err, bufio.ErrTooLong):
		return nil, fmt.Errorf("the script's output has a line of more than %d bytes: it is not that of this script", maxLine)
	case err != nil:
		return nil, fmt.Errorf("%w: %w", ErrUnfinished, err)
	}
	return nil, ErrUnfinished
}

// Result is a calibration. Only what identifies it is read here: the cost models read the rest.
type Result struct {
	// GPU is the name of the GPUs, World how many ranks measured, one on each; Timing is "device" or "host".
	GPU    string
	World  int
	Timing string
	// Rows and Skipped count the measurements, and those that were left out.
	Rows, Skipped int
	// JSON is all of it, as the script has written it.
	JSON []byte
}

// sections are the lists of measurements of a result.
var sections = []string{"all_to_all", "collectives", "send", "gate_up_gemm", "gemm", "attention", "attention_decode", "copy"}

// Parse reads a result, and refuses what is none.
func Parse(data []byte) (*Result, error) {
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
		return nil, fmt.Errorf("calibration: no measurement (%d were left out; the skipped ones say why)", result.Skipped)
	}
	return result, nil
}

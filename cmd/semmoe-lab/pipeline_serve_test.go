// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"encoding/json"
	"io"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/semmoe/operator/cmd/internal/cli"
	"github.com/semmoe/operator/cmd/internal/clitest"
)

// stagesFile returns the path of stage times that were measured on two H200.
func stagesFile(t testing.TB) string {
	t.Helper()
	text, err := os.ReadFile("../../solver/pipeline/testdata/disaggregated-deepseek-v2-h200x2.json")
	if err != nil {
		t.Fatal(err)
	}
	var measured struct {
		Stages json.RawMessage `json:"stages"`
	}
	if err := json.Unmarshal(text, &measured); err != nil {
		t.Fatal(err)
	}
	path := filepath.Join(t.TempDir(), "stages.json")
	if err := os.WriteFile(path, measured.Stages, 0o600); err != nil {
		t.Fatal(err)
	}
	return path
}

func TestPipelineServe(t *testing.T) {
	times, err := readStages(stagesFile(t))
	if err != nil {
		t.Fatal(err)
	}
	listener, err := (&net.ListenConfig{}).Listen(t.Context(), "tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	ctx, stop := context.WithCancel(t.Context())
	ended := make(chan error, 1)
	go func() { ended <- serveSchedules(ctx, listener, times, 32) }()
	post := func(body string) (int, string) {
		response, err := http.Post("http://"+listener.Addr().String()+"/v1/schedules", "application/json", strings.NewReader(body)) //nolint:noctx // the server ends with the test
		if err != nil {
			t.Fatal(err)
		}
		defer response.Body.Close()
		text, err := io.ReadAll(response.Body)
		if err != nil {
			t.Fatal(err)
		}
		return response.StatusCode, string(text)
	}
	status, text := post(`{"sequence": 2048, "samples": 4}`)
	var answer scheduleAnswer
	if err := json.Unmarshal([]byte(text), &answer); err != nil || status != http.StatusOK {
		t.Fatalf("status %d: %s, error %v", status, text, err)
	}
	if p := answer.Plan; p.Samples*p.Sizes.MicroBatches != 4 || len(p.Order) != 2*p.Sizes.MicroBatches || p.Makespan > answer.Naive.Makespan || p.Check() != nil {
		t.Errorf("the schedule is %+v; naive is %+v", p, answer.Naive)
	}
	for body, want := range map[string]string{
		``:                               "failed to read the batch",
		`{"sequence": 2048}`:             "samples: 0 is invalid",
		`{"sequence": -1, "samples": 1}`: "sequence: -1 is invalid",
		`{"sequence": 2048, "samples": 99999999}`: "samples: 99999999 is invalid",
		`{"sequence": 1, "samples": 1, "x": 1}`:   `unknown field \"x\"`,
		`{"sequence": 1, "samples": 1} {}`:        "text after the object",
		strings.Repeat(" ", maxScheduleRequest+1): "too large",
	} {
		if status, text := post(body); status != http.StatusBadRequest || !strings.Contains(text, want) {
			t.Errorf("%.60s: status %d: %s; want 400 and %q", body, status, text, want)
		}
	}
	stop()
	if err := <-ended; err != nil {
		t.Errorf("the server ended with %v", err)
	}
}

func TestPipelineServeRefuses(t *testing.T) {
	broken := filepath.Join(t.TempDir(), "broken.json")
	if err := os.WriteFile(broken, []byte(`{"format": "other"}`), 0o600); err != nil {
		t.Fatal(err)
	}
	for _, c := range []struct {
		args []string
		code int
		want string
	}{
		{nil, cli.ExitUsage, "--stages is missing"},
		{[]string{"--stages", broken}, cli.ExitInvalidFile, "format: \"other\" is invalid"},
		{[]string{"--stages", broken, "--max-micro-batches", "0"}, cli.ExitUsage, "--max-micro-batches is 0"},
		{[]string{"--stages", stagesFile(t), "--listen", "nowhere"}, 1, "--listen"},
	} {
		code, _, message := clitest.Run(t, newPipelineServeCommand(), c.args...)
		if code != c.code || !strings.Contains(message, c.want) {
			t.Errorf("%v: exit code %d: %s; want %d and %q", c.args, code, message, c.code, c.want)
		}
	}
}

// BenchmarkSchedule measures the time of an answer without HTTP.
func BenchmarkSchedule(b *testing.B) {
	times, err := readStages(stagesFile(b))
	if err != nil {
		b.Fatal(err)
	}
	handler := scheduleHandler{times, 32}
	for b.Loop() {
		if _, err := handler.solve(strings.NewReader(`{"sequence": 4096, "samples": 16}`)); err != nil {
			b.Fatal(err)
		}
	}
}

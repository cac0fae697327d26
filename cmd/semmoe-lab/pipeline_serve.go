// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"time"

	"github.com/go-logr/logr"
	"github.com/spf13/cobra"

	"github.com/semmoe/operator/cmd/internal/cli"
	"github.com/semmoe/operator/internal/files/regularfile"
	"github.com/semmoe/operator/internal/httpserver"
	"github.com/semmoe/operator/solver/pipeline"
)

func newPipelineServeCommand() *cobra.Command {
	var stages, listen string
	var microBatches int
	cmd := &cobra.Command{
		Use:   "serve --stages FILE [--listen ADDRESS]",
		Short: "Serve schedules for batches over HTTP",
		Long: "Answer POST /v1/schedules with the schedule of a batch: {\"sequence\": tokens of a sample, \"samples\": maximum number of samples}. An executor of\n" +
			"disaggregated attention and experts asks for each batch, because the best schedule depends on lengths (FinDEP's online phase).\n" +
			"Times are those of measured tasks on one attention rank and one expert rank, from test/gpu/disaggregated_moe.py stages.\n" +
			"GET /healthz answers 200.\n" +
			"Exit codes: 2 the command line is invalid; 3 the file is invalid; 1 any other error, which a retry may fix.",
		Args: cli.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if microBatches < 1 || microBatches > pipeline.DefaultMicroBatches {
				return cli.UsageErrorf("--max-micro-batches is %d; allowed is 1 to %d", microBatches, pipeline.DefaultMicroBatches)
			}
			if stages == "" {
				return cli.UsageErrorf("--stages is missing; set it to a file of measured stage times")
			}
			times, err := readStages(stages)
			if err != nil {
				return err
			}
			listener, err := (&net.ListenConfig{}).Listen(cmd.Context(), "tcp", listen)
			if err != nil {
				return fmt.Errorf("--listen: %w", err)
			}
			fmt.Fprintf(cmd.OutOrStdout(), "Serving schedules on http://%s\n", listener.Addr())
			return serveSchedules(cmd.Context(), listener, times, microBatches)
		},
	}
	cmd.SetFlagErrorFunc(cli.FlagError)
	f := cmd.Flags()
	f.StringVar(&stages, "stages", "", "file of measured stage times")
	f.StringVar(&listen, "listen", "127.0.0.1:8091", "address to listen on")
	f.IntVar(&microBatches, "max-micro-batches", pipeline.DefaultMicroBatches, "maximum number of micro-batches")
	return cmd
}

func readStages(path string) (*pipeline.StageTimes, error) {
	text, err := regularfile.Read(path, cli.MaxInputBytes)
	if err != nil {
		return nil, cli.InputError(fmt.Errorf("--stages: %w", err))
	}
	times, err := pipeline.ParseStageTimes(text)
	if err != nil {
		return nil, cli.WithCode(fmt.Errorf("--stages: %s: %w", path, err), cli.ExitInvalidFile)
	}
	return times, nil
}

// serveSchedules serves until the context ends.
func serveSchedules(ctx context.Context, listener net.Listener, times *pipeline.StageTimes, microBatches int) error {
	routes := http.NewServeMux()
	routes.HandleFunc("GET /healthz", func(w http.ResponseWriter, _ *http.Request) { w.WriteHeader(http.StatusOK) })
	routes.Handle("POST /v1/schedules", scheduleHandler{times, microBatches})
	server := httpserver.New(httpserver.Options{
		Handler: routes, Log: logr.FromContextOrDiscard(ctx), ReadTimeout: 10 * time.Second, WriteTimeout: 10 * time.Second,
	})
	stop := context.AfterFunc(ctx, func() {
		last, cancel := context.WithTimeout(context.WithoutCancel(ctx), 5*time.Second)
		defer cancel()
		server.Shutdown(last) //nolint:errcheck // requests that take longer are cut
	})
	defer stop()
	return server.Serve(listener)
}

const (
	// maxScheduleRequest is the size of a request in bytes: two numbers.
	maxScheduleRequest = 4 << 10
	// maxSamples and maxSequence bound the time of a search.
	maxSamples, maxSequence = 1 << 12, 1 << 20
)

// scheduleHandler answers requests for schedules.
type scheduleHandler struct {
	times        *pipeline.StageTimes
	microBatches int
}

// scheduleRequest is a batch of at most Samples samples of Sequence tokens.
type scheduleRequest struct {
	Sequence int `json:"sequence"`
	Samples  int `json:"samples"`
}

// scheduleAnswer is the schedule of a batch, and the time that the search took.
type scheduleAnswer struct {
	*pipeline.Result
	SolveSeconds float64 `json:"solve_seconds"`
}

func (h scheduleHandler) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	begin := time.Now()
	w.Header().Set("Content-Type", "application/json")
	result, err := h.solve(http.MaxBytesReader(w, r.Body, maxScheduleRequest))
	if err != nil {
		w.WriteHeader(http.StatusBadRequest)
		json.NewEncoder(w).Encode(map[string]string{"error": err.Error()}) //nolint:errcheck // the client is gone
		return
	}
	json.NewEncoder(w).Encode(scheduleAnswer{result, time.Since(begin).Seconds()}) //nolint:errcheck // the client is gone
}

func (h scheduleHandler) solve(body io.Reader) (*pipeline.Result, error) {
	var asked scheduleRequest
	decoder := json.NewDecoder(body)
	decoder.DisallowUnknownFields()
	if err := decoder.Decode(&asked); err != nil {
		return nil, fmt.Errorf("failed to read the batch: %w", err)
	}
	if _, err := decoder.Token(); !errors.Is(err, io.EOF) {
		return nil, errors.New("failed to read the batch: there is text after the object")
	}
	if asked.Sequence < 1 || asked.Sequence > maxSequence {
		return nil, fmt.Errorf("sequence: %d is invalid: allowed are 1 to %d tokens", asked.Sequence, maxSequence)
	}
	if asked.Samples < 1 || asked.Samples > maxSamples {
		return nil, fmt.Errorf("samples: %d is invalid: allowed are 1 to %d", asked.Samples, maxSamples)
	}
	problem, err := h.times.Problem(asked.Sequence, asked.Samples, h.microBatches)
	if err != nil {
		return nil, err
	}
	return pipeline.Search(problem)
}

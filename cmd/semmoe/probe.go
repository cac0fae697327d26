package main

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/http"
	"net/url"
	"runtime/debug"
	"strings"

	"github.com/go-logr/logr"
	"github.com/spf13/cobra"

	"github.com/semmoe/operator/internal/engine/registry"
	"github.com/semmoe/operator/internal/httpserver"
	"github.com/semmoe/operator/internal/lossless"
)

const (
	// probeMemory is where the garbage collector begins to work harder, so that the process stays well below 64 MiB.
	probeMemory = 24 << 20
	// probeReadyPath is where the pod's readiness is asked for.
	probeReadyPath = "/readyz"
)

// probeFlags are the flags of semmoe probe.
type probeFlags struct {
	engine, address, model, answers, listen, messageFile string
	ranks                                                int
}

func newProbeCommand() *cobra.Command {
	var flags probeFlags
	command := &cobra.Command{
		Use:   "probe --address http://IP:PORT --model-name NAME --ranks N --answers FILE --listen IP:PORT",
		Short: "Compare a planned engine's outputs with those of the unplanned start, and tell when it is ready",
		Long: "Wait until an engine serves, compare its answers to fixed prompts, on every rank, with those that it gave without a plan,\n" +
			"and then answer GET " + probeReadyPath + " with 200, with 503 before. An engine that was away is checked again. Runs beside the engine\n" +
			"until SIGTERM. Exit code 3: the outputs differ, or flags or stored answers are invalid; the reason stands on one line, also\n" +
			"in the termination message. 1: try again.",
		Args: invalidArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			err := runProbe(withLogger(cmd.Context(), "probe"), flags)
			if err == nil {
				return nil
			}
			err = codedError{errors.New(oneLine(err.Error())), exitCode(err)}
			if writeErr := writeTerminationMessage(flags.messageFile, err.Error()); writeErr != nil {
				printError(cmd.ErrOrStderr(), writeErr)
			}
			return err
		},
	}
	command.SetFlagErrorFunc(func(_ *cobra.Command, err error) error { return codedError{err, exitInvalidFile} })
	f := command.Flags()
	f.StringVar(&flags.engine, "engine", "SGLang", "type of the engine")
	f.StringVar(&flags.address, "address", "", "base URL of the engine (required)")
	f.StringVar(&flags.model, "model-name", "", "name by which the engine serves the model (required)")
	f.IntVar(&flags.ranks, "ranks", 1, "ranks that requests can be pinned to; 1 where they have none")
	f.StringVar(&flags.answers, "answers", "", "file with the answers of the unplanned start (required)")
	f.StringVar(&flags.listen, "listen", "", "host:port on which to answer GET "+probeReadyPath+" (required)")
	f.StringVar(&flags.messageFile, "termination-message", "", "file for the termination message (default "+terminationLog+" where it exists)")
	return command
}

// runProbe returns nil when ctx ends.
func runProbe(ctx context.Context, flags probeFlags) error {
	debug.SetMemoryLimit(probeMemory)
	probe, err := flags.probe()
	if err != nil {
		return codedError{err, exitInvalidFile}
	}
	listener, err := net.Listen("tcp", joinIP(flags.listen))
	if err != nil {
		return fmt.Errorf("--listen: %w", err)
	}
	routes := http.NewServeMux()
	routes.Handle("GET "+probeReadyPath, probe)
	server := httpserver.NewProbes(routes, logr.FromContextOrDiscard(ctx))
	defer server.Close()
	go server.Serve(listener) //nolint:errcheck // it ends with Close

	err = probe.Run(ctx)
	var difference *lossless.DifferenceError
	switch {
	case errors.As(err, &difference):
		return codedError{fmt.Errorf("the outputs are not those of the unplanned start: %w", err), exitInvalidFile}
	case ctx.Err() != nil:
		return nil
	}
	return err
}

// probe checks the flags and reads the stored answers.
func (f probeFlags) probe() (*lossless.Probe, error) {
	for _, flag := range []struct{ name, value string }{
		{"address", f.address}, {"model-name", f.model}, {"answers", f.answers}, {"listen", f.listen},
	} {
		if flag.value == "" {
			return nil, fmt.Errorf("--%s is missing", flag.name)
		}
	}
	if f.ranks < 1 || f.ranks > 1<<16 {
		return nil, fmt.Errorf("--ranks is %d; allowed is 1 to %d", f.ranks, 1<<16)
	}
	adapter, err := registry.For(f.engine)
	if err != nil {
		return nil, fmt.Errorf("--engine: %w", err)
	}
	address := strings.TrimSuffix(joinURL(f.address), "/")
	if u, err := url.Parse(address); err != nil || u.Scheme != "http" && u.Scheme != "https" || u.Host == "" {
		return nil, fmt.Errorf("--address is %q; want http://host:port", f.address)
	}
	answers, err := lossless.Read(f.answers)
	if err != nil {
		return nil, err
	}
	client := &lossless.Client{Address: address, Model: f.model}
	return lossless.NewProbe(client, adapter.HealthPath, answers, f.ranks, adapter.RankHeader), nil
}

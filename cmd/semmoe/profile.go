// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"time"

	"github.com/go-logr/logr"
	"github.com/spf13/cobra"

	"github.com/semmoe/operator/cmd/internal/cli"
	"github.com/semmoe/operator/internal/artifact"
	"github.com/semmoe/operator/internal/artifact/access"
	"github.com/semmoe/operator/internal/engine/registry"
	"github.com/semmoe/operator/internal/files/atomicfile"
	"github.com/semmoe/operator/internal/files/regularfile"
	"github.com/semmoe/operator/internal/httpserver"
	"github.com/semmoe/operator/internal/model/checkpoint"
	"github.com/semmoe/operator/internal/model/tokenizer"
	"github.com/semmoe/operator/internal/profile"
	"github.com/semmoe/operator/internal/profile/inspection"
	"github.com/semmoe/operator/solver/trace"
)

const (
	// exitEngine is the exit code of an engine failure that another attempt would repeat. It is used in a Job's
	// podFailurePolicy.
	exitEngine = 4
	// exitStoreFull is the exit code of a full artifact store. Space must be freed before another attempt may use
	// devices.
	exitStoreFull = 5
	// The backends of a profile.
	backendEngine       = "Engine"
	backendTransformers = "Transformers"
	// profileStoreRetry is the time limit for an unavailable or full artifact store before a recorded profile is
	// discarded. A full store is retried every profileFullPeriod.
	profileStoreRetry = 10 * time.Minute
	profileFullPeriod = 20 * time.Second
)

type profileOptions struct {
	endpoint, engine, model, dataset, out      string
	layoutAs                                   string
	requests, tokens, requestTokens, newTokens int
	traceTokens, concurrency                   int
	seed                                       uint64
	wait, timeout                              time.Duration
	dedicated, ownText                         bool
	scope                                      string
	modelDigest, datasetDigest                 string
	progressAddress, messageFile               string
	backend, python                            string
	recorderArgs                               []string
}

func newProfileCommand() *cobra.Command {
	var o profileOptions
	command := &cobra.Command{
		Use:   "profile (--endpoint URL | --backend Transformers) --model-path DIR (--dataset FILE | --own-text) (--out TRACE | --store-scope NAMESPACE/ID)",
		Short: "Record the experts that the tokens of a data set activate",
		Long: `Send the requests of a data set to a running engine, or to the request router in front of it, and write the routing
trace: which experts each token activated. The engine must have been started with --enable-return-routed-experts.

With --backend Transformers no engine is needed: a Python program loads the checkpoint with PyTorch and Hugging Face
transformers (5.0 or later) and records the experts of the prompts, one layer after the other, on a GPU or on CPUs.

The data set is JSONL: {"prompt": "..."}, {"messages": [{"role", "content"}, ...]} or ShareGPT's {"conversations":
[{"from", "value"}, ...]}, each with an optional "domain". Without a data set, --own-text records text that the model
writes itself.

Exit codes: 3 the model, the data set or a flag is invalid; 4 the engine failed; 5 the artifact store is full;
1 any other error, which a retry may fix.`,
		Args: invalidArgs,
		RunE: func(command *cobra.Command, _ []string) error {
			summary, err := runProfile(command.Context(), o, command.Flags().Changed)
			if err != nil {
				err = profileError{err}
				if writeErr := writeTerminationMessage(o.messageFile, oneLine(err.Error())); writeErr != nil {
					cli.PrintError(command.ErrOrStderr(), "semmoe", writeErr)
				}
				return err
			}
			return json.NewEncoder(command.OutOrStdout()).Encode(summary)
		},
	}
	command.SetFlagErrorFunc(func(_ *cobra.Command, err error) error { return profileError{checkpoint.Invalidf("%v", err)} })
	flags := command.Flags()
	flags.StringVar(&o.backend, "backend", backendEngine, "program that computes the requests: "+backendEngine+" or "+backendTransformers)
	flags.StringVar(&o.endpoint, "endpoint", "", "base URL of the engine or its request router (required with --backend Engine), or of a running recorder (default with --backend Transformers: the command starts one)")
	flags.StringVar(&o.python, "python", "python3", "Python interpreter with PyTorch and transformers, with --backend Transformers and without --endpoint")
	flags.StringArrayVar(&o.recorderArgs, "recorder-arg", nil, "`FLAG` of the recorder that the command starts, such as --device=cpu, --dtype=float32 or --offload-dir=DIR; may be repeated")
	flags.StringVar(&o.engine, "engine", "SGLang", "type of the engine: "+registry.Types())
	flags.BoolVar(&o.dedicated, "dedicated", false, "dedicated engine of this profile: its crash, or a timeout before it serves, ends the run with exit code 4 because a retry would fail in the same way")
	flags.StringVar(&o.model, "model-path", "", "directory of the checkpoint that the engine serves (required)")
	flags.StringVar(&o.layoutAs, "layout-as", "", layoutAsHelp)
	flags.StringVar(&o.modelDigest, "model-digest", "", "required digest of the checkpoint (default: any)")
	flags.StringVar(&o.dataset, "dataset", "", "JSONL file with the requests (required without --own-text)")
	flags.BoolVar(&o.ownText, "own-text", false, "text that the model writes itself, in place of a data set: each request continues a random token at temperature 1 up to --request-tokens tokens")
	flags.StringVar(&o.datasetDigest, "dataset-digest", "", "required sha256 of the data set (default: any)")
	flags.StringVar(&o.out, "out", "", "trace file to write, .safetensors or .safetensors.zst")
	flags.StringVar(&o.scope, "store-scope", "", "namespace/id of the profile in the artifact store, in a pod with access to the store; an existing profile ends the run without requests")
	flags.IntVar(&o.requests, "requests", 2000, "maximum number of requests, a uniform sample of the data set")
	flags.IntVar(&o.tokens, "tokens", 200_000, "maximum number of recorded tokens")
	flags.IntVar(&o.traceTokens, "trace-tokens", 500_000, "maximum number of tokens in the routing trace, a uniform sample of whole requests; the counts include all tokens")
	flags.IntVar(&o.requestTokens, "request-tokens", 512, "maximum number of prompt tokens per request")
	flags.IntVar(&o.newTokens, "new-tokens", 1, "number of generated tokens per request")
	flags.IntVar(&o.concurrency, "concurrency", 16, "number of concurrent requests")
	flags.Uint64Var(&o.seed, "seed", 1, "seed of the samples")
	flags.DurationVar(&o.wait, "wait", 10*time.Minute, "time limit until the engine serves")
	flags.DurationVar(&o.timeout, "timeout", 0, "time limit of the whole run (default: no limit)")
	flags.StringVar(&o.progressAddress, "progress-address", "", "host:port of the progress endpoint GET "+profile.ProgressPath+" (default: disabled)")
	flags.StringVar(&o.messageFile, "termination-message", "", "file for the termination message (default "+terminationLog+", if it exists)")
	return command
}

// profileError adds the exit code to an error.
type profileError struct{ error }

func (e profileError) Unwrap() error { return e.error }

func (e profileError) ExitCode() int {
	var dataset *profile.DatasetError
	var engine *profile.EngineError
	switch {
	case errors.Is(e.error, artifact.ErrFull):
		return exitStoreFull
	case errors.As(e.error, &engine), errors.Is(e.error, errTimeout):
		return exitEngine
	case errors.As(e.error, &dataset), errors.Is(e.error, os.ErrNotExist), checkpoint.IsInvalid(e.error):
		return cli.ExitInvalidFile
	}
	return 1
}

// errTimeout reports that a run exceeded --timeout; a retry would exceed it as well.
var errTimeout = errors.New("the run exceeded --timeout: the engine is too slow for the number of tokens")

// validate checks the values of flags; given reports which flags are set.
func (o *profileOptions) validate(given func(flag string) bool) error {
	if err := o.validateBackend(given); err != nil {
		return err
	}
	for _, flag := range []struct{ name, value string }{{"endpoint", o.endpoint}, {"model-path", o.model}} {
		if flag.value == "" && (flag.name != "endpoint" || o.backend == backendEngine) {
			return checkpoint.Invalidf("--%s is missing", flag.name)
		}
	}
	if (o.dataset == "") != o.ownText {
		return checkpoint.Invalidf("exactly one of --dataset and --own-text is required")
	}
	if err := checkDigests(given, map[string]string{"model-digest": o.modelDigest, "dataset-digest": o.datasetDigest}); err != nil {
		return checkpoint.Invalidf("%v", err)
	}
	if (o.out == "") == (o.scope == "") {
		return checkpoint.Invalidf("exactly one of --out and --store-scope is required")
	}
	if o.out != "" && !strings.HasSuffix(o.out, ".safetensors") && !strings.HasSuffix(o.out, ".safetensors.zst") {
		return checkpoint.Invalidf("--out is %q: want a name that ends in .safetensors or .safetensors.zst", o.out)
	}
	for _, flag := range []struct {
		name  string
		value int
	}{{"requests", o.requests}, {"tokens", o.tokens}, {"request-tokens", o.requestTokens}, {"new-tokens", o.newTokens}, {"concurrency", o.concurrency}} {
		if flag.value < 1 {
			return checkpoint.Invalidf("--%s is %d; it must be at least 1", flag.name, flag.value)
		}
	}
	if longest := o.requestTokens + o.newTokens; o.traceTokens < longest {
		return checkpoint.Invalidf("--trace-tokens is %d; it must be at least --request-tokens plus --new-tokens, %d, because requests are traced whole", o.traceTokens, longest)
	}
	if o.out != "" {
		if err := atomicfile.Check(o.out); err != nil {
			return checkpoint.Invalidf("--out: %v", err)
		}
	}
	return nil
}

// validateBackend refuses an unknown backend, and flags that the backend does not use.
func (o *profileOptions) validateBackend(given func(flag string) bool) error {
	unused := []string{"python", "recorder-arg"}
	if o.ownText {
		unused = append(unused, "new-tokens", "dataset-digest")
	}
	switch {
	case o.backend == backendTransformers && o.ownText:
		return checkpoint.Invalidf("--own-text needs --backend %s: the other backend generates no text", backendEngine)
	case o.backend == backendTransformers && o.endpoint == "":
		unused = []string{"engine", "dedicated", "new-tokens", "concurrency"}
	case o.backend == backendTransformers:
		unused = append(unused, "engine", "dedicated", "new-tokens", "concurrency")
	case o.backend != backendEngine:
		return checkpoint.Invalidf("--backend is %q; it must be %s or %s", o.backend, backendEngine, backendTransformers)
	}
	for _, flag := range unused {
		if given(flag) {
			return checkpoint.Invalidf("--%s has no effect with --backend %s, --endpoint %q and --own-text=%t: remove it", flag, o.backend, o.endpoint, o.ownText)
		}
	}
	return nil
}

// sampling returns the options that determine the profile.
func (o *profileOptions) sampling() profile.Sampling {
	return profile.Sampling{Requests: o.requests, Tokens: o.tokens, RequestTokens: o.requestTokens}
}

func runProfile(ctx context.Context, o profileOptions, given func(flag string) bool) (profile.Summary, error) {
	if err := o.validate(given); err != nil {
		return profile.Summary{}, err
	}
	if o.timeout > 0 {
		limited, cancel := context.WithTimeoutCause(ctx, o.timeout, errTimeout)
		defer cancel()
		ctx = limited
	}
	board := &profile.ProgressHandler{}
	if o.progressAddress != "" {
		stop, err := serveProgress(joinIP(o.progressAddress), board)
		if err != nil {
			return profile.Summary{}, err
		}
		defer stop()
	}
	inputs, dataset, err := readInputs(o)
	if err != nil {
		return profile.Summary{}, err
	}
	report := reportProgress(board, progressLine(os.Stderr))
	inputs.Progress = report
	record := func() (*profile.Profile, error) { return profile.Run(ctx, inputs) }
	if o.backend == backendTransformers {
		record = func() (*profile.Profile, error) { return recordWithTransformers(ctx, o, inputs) }
	}
	var summary profile.Summary
	if o.scope != "" {
		manifest := profile.Manifest{ModelDigest: inputs.Report.ModelDigest, DatasetDigest: dataset.Digest, Sampling: o.sampling()}
		summary, err = profileToStore(ctx, access.FromPod, o, manifest, record, func() { report(profile.Progress{Phase: profile.Storing}) })
	} else {
		summary, err = profileToFile(o.out, record)
	}
	if err != nil && errors.Is(context.Cause(ctx), errTimeout) && !errors.Is(err, artifact.ErrFull) {
		err = errTimeout
	}
	return summary, err
}

// readInputs reads the checkpoint's headers and the data set, and returns an error if their digests differ from the
// required ones.
func readInputs(o profileOptions) (profile.Options, inspection.DatasetReport, error) {
	fail := func(err error) (profile.Options, inspection.DatasetReport, error) {
		return profile.Options{}, inspection.DatasetReport{}, err
	}
	adapter, err := registry.For(o.engine)
	if err != nil {
		return fail(checkpoint.Invalidf("--engine: %v", err))
	}
	if o.backend == backendEngine && !adapter.ReportsRoutedExperts() {
		return fail(checkpoint.Invalidf("--engine is %s, which does not report the experts of a request; use another engine, or --backend Transformers", adapter.Type))
	}
	report, err := checkpoint.InspectAs(o.model, o.layoutAs)
	if err != nil {
		return fail(err)
	}
	if report.Unprofilable != "" {
		return fail(checkpoint.Invalidf("the model in %s cannot be profiled: %s", o.model, report.Unprofilable))
	}
	if o.modelDigest != "" && report.ModelDigest != o.modelDigest {
		return fail(checkpoint.Invalidf("the checkpoint in %s has digest %s, not %s: it changed after the inspection; profile it again", o.model, report.ModelDigest, o.modelDigest))
	}
	config, err := regularfile.Read(filepath.Join(o.model, "config.json"), cli.MaxInputBytes)
	if err != nil {
		return fail(err)
	}
	items, dataset, err := readItems(o, report.Vocab)
	if err != nil {
		return fail(err)
	}
	if o.datasetDigest != "" && dataset.Digest != o.datasetDigest {
		return fail(checkpoint.Invalidf("the data set %s has digest %s, not %s: it changed after the inspection; profile it again", o.dataset, dataset.Digest, o.datasetDigest))
	}
	return profile.Options{
		Endpoint: strings.TrimSuffix(joinURL(o.endpoint), "/"), Dedicated: o.dedicated, Adapter: adapter, Report: report, Config: string(config),
		Items: items, Seed: o.seed, Tokens: o.tokens, TraceTokens: o.traceTokens, RequestTokens: o.requestTokens, NewTokens: o.newTokens,
		Concurrency: o.concurrency, Wait: o.wait,
	}, dataset, nil
}

// readItems returns the requests of the data set, or those for the model's own text.
func readItems(o profileOptions, vocabulary int) ([]profile.Item, inspection.DatasetReport, error) {
	if !o.ownText {
		return profile.LoadDataset(o.dataset, o.requests, o.seed)
	}
	words, err := readTokenizer(o.model)
	if err != nil {
		return nil, inspection.DatasetReport{}, err
	}
	items, dataset := profile.OwnText(o.requests, words, vocabulary, o.seed)
	return items, dataset, nil
}

func profileToFile(out string, record func() (*profile.Profile, error)) (profile.Summary, error) {
	recorded, err := record()
	if err != nil {
		return profile.Summary{}, err
	}
	return recorded.Summary, cli.WriteTrace(out, recorded.Trace)
}

// profileToStore records a profile and publishes it in the store, unless the store already contains it.
func profileToStore(ctx context.Context, connect connectStore, o profileOptions, manifest profile.Manifest, record func() (*profile.Profile, error), storing func()) (profile.Summary, error) {
	namespace, id, _ := strings.Cut(o.scope, "/")
	scope := artifact.Scope{Namespace: namespace, Kind: artifact.Profile, ID: id}
	if err := scope.Validate(); err != nil {
		return profile.Summary{}, checkpoint.Invalidf("--store-scope is %q, want namespace/id: %v", o.scope, err)
	}
	if manifest.ID() != id {
		return profile.Summary{}, checkpoint.Invalidf("--store-scope has the profile id %s; the id of this model, data set and sampling is %s", id, manifest.ID())
	}
	store, err := connect(profileStoreRetry)
	if err != nil {
		return profile.Summary{}, err
	}
	switch won, err := store.Published(ctx, scope); {
	case err == nil:
		stored, err := profile.FetchManifest(ctx, store, scope, won)
		return stored.Summary, err
	case !errors.Is(err, artifact.ErrNotFound):
		return profile.Summary{}, fmt.Errorf("failed to look up the profile in the artifact store: %w", err)
	}
	words, err := readTokenizer(o.model)
	if err != nil {
		return profile.Summary{}, err
	}
	if err := probeRoom(ctx, store, scope, o.model, words); err != nil {
		return profile.Summary{}, err
	}
	dir, err := os.MkdirTemp("", "profile-")
	if err != nil {
		return profile.Summary{}, err
	}
	defer os.RemoveAll(dir)
	// A dedicated engine loads its model at the same time.
	vectors, without, err := profile.CreateEmbeddings(ctx, dir, o.model, o.layoutAs)
	if err != nil {
		return profile.Summary{}, err
	}
	recorded, err := record()
	if err != nil {
		return profile.Summary{}, err
	}
	storing()
	files, err := profileFiles(dir, words, recorded)
	if err != nil {
		return profile.Summary{}, err
	}
	if manifest.NoEmbeddings = without; without == "" {
		files[profile.EmbeddingsFile] = vectors
	}
	manifest.Summary = recorded.Summary
	return recorded.Summary, untilRoom(ctx, func() error {
		_, err := profile.Publish(ctx, store, scope, manifest, files)
		return err
	})
}

// readTokenizer returns the checkpoint's tokenizer, or nil if the checkpoint has none that can be read. A
// tokenizer.json is stored even if it uses unsupported features: a later version of the request router may support
// them.
func readTokenizer(model string) ([]byte, error) {
	words, err := tokenizer.FromCheckpoint(model)
	if errors.Is(err, fs.ErrNotExist) || errors.Is(err, tokenizer.ErrUnsupported) {
		return nil, nil
	}
	if err != nil {
		return nil, checkpoint.Invalidf("%v", err)
	}
	return words, nil
}

// probeRoom stores a file that is available without the engine, the tokenizer or config.json, to detect a full store
// before devices are used.
func probeRoom(ctx context.Context, store *access.Client, scope artifact.Scope, model string, words []byte) error {
	if words == nil {
		var err error
		if words, err = regularfile.Read(filepath.Join(model, "config.json"), cli.MaxInputBytes); err != nil {
			return err
		}
	}
	if _, err := store.Put(ctx, scope, bytes.NewReader(words)); err != nil {
		return fmt.Errorf("failed to write to the artifact store before the first request: %w", err)
	}
	return nil
}

// untilRoom retries publish for profileStoreRetry while the store is full: a garbage collection or an administrator may
// free space.
func untilRoom(ctx context.Context, publish func() error) error {
	end := time.Now().Add(profileStoreRetry)
	for {
		err := publish()
		if !errors.Is(err, artifact.ErrFull) || time.Now().Add(profileFullPeriod).After(end) {
			return err
		}
		select {
		case <-ctx.Done():
			return errors.Join(err, ctx.Err())
		case <-time.After(profileFullPeriod):
		}
	}
}

// profileFiles writes the files of a profile to dir and returns their paths by name. words is the tokenizer, or nil.
func profileFiles(dir string, words []byte, recorded *profile.Profile) (map[string]string, error) {
	files := map[string]string{
		profile.TraceFile:  filepath.Join(dir, profile.TraceFile),
		profile.CountsFile: filepath.Join(dir, profile.CountsFile),
	}
	if err := errors.Join(trace.Create(files[profile.TraceFile], recorded.Trace), recorded.CreateCounts(files[profile.CountsFile])); err != nil {
		return nil, err
	}
	if words == nil {
		return files, nil
	}
	files[profile.TokenizerFile] = filepath.Join(dir, profile.TokenizerFile)
	return files, os.WriteFile(files[profile.TokenizerFile], words, 0o600)
}

// serveProgress serves the progress endpoint until stop is called.
func serveProgress(address string, board http.Handler) (stop func(), err error) {
	listener, err := net.Listen("tcp", address)
	if err != nil {
		return nil, fmt.Errorf("--progress-address: %w", err)
	}
	server := httpserver.NewProbes(board, logr.Discard())
	go server.Serve(listener) //nolint:errcheck // it ends with Close
	return func() { server.Close() }, nil
}

// joinIP encloses an IPv6 address in brackets, which $(POD_IP):port lacks.
func joinIP(address string) string {
	i := strings.LastIndexByte(address, ':')
	if i < 0 || strings.HasPrefix(address, "[") {
		return address
	}
	return net.JoinHostPort(address[:i], address[i+1:])
}

// joinURL is joinIP for the host of a URL.
func joinURL(address string) string {
	scheme, rest, found := strings.Cut(address, "://")
	if !found {
		return address
	}
	host, path, _ := strings.Cut(rest, "/")
	if strings.Count(host, ":") > 1 {
		host = joinIP(host)
	}
	if path != "" {
		path = "/" + path
	}
	return scheme + "://" + host + path
}

func reportProgress(board *profile.ProgressHandler, line func(profile.Progress)) func(profile.Progress) {
	return func(p profile.Progress) {
		board.Set(p)
		if p.Phase == profile.Recording && p.Done > 0 {
			line(p)
		}
	}
}

// progressLine prints the progress of a run: every 250 ms on a terminal, every ten seconds elsewhere.
func progressLine(w *os.File) func(profile.Progress) {
	info, err := w.Stat()
	terminal := err == nil && info.Mode()&os.ModeCharDevice != 0
	period, form := 10*time.Second, "%s\n"
	if terminal {
		period, form = 250*time.Millisecond, "\r\033[K%s"
	}
	var last time.Time
	return func(p profile.Progress) {
		finished := p.Done == p.Total || p.Tokens >= p.TokensTotal
		if time.Since(last) < period && !finished {
			return
		}
		last = time.Now()
		fmt.Fprintf(w, form, fmt.Sprintf("%d of %d requests, %d tokens, %.0f tokens/s, %v left", p.Done, p.Total, p.Tokens, p.TokensPerSecond(), p.Remaining()))
		if terminal && finished {
			fmt.Fprintln(w)
		}
	}
}

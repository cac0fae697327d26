// SPDX-License-Identifier: Apache-2.0

package profile

import (
	"bufio"
	"bytes"
	"context"
	_ "embed"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"slices"
	"time"

	"github.com/semmoe/operator/internal/engine"
	"github.com/semmoe/operator/internal/profile/counts"
)

// TransformersRecorder is the Python program of the backend Transformers. Its docstring describes its protocol.
//
//go:embed transformers_recorder.py
var TransformersRecorder string

// maxFrame bounds a line of the recorder's response. The longest line has the token IDs of all requests.
const maxFrame = 1 << 30

// RunTransformers records the profile with the recorder that serves at o.Endpoint. Adapter, NewTokens and Concurrency
// are ignored: prompts pass through one layer after the other, and nothing is generated. It returns an *EngineError if
// another attempt would fail in the same way.
func RunTransformers(ctx context.Context, o Options) (*Profile, error) {
	if err := o.validate(); err != nil {
		return nil, err
	}
	o.report(Progress{Phase: WaitingForEngine})
	c := &client{base: o.Endpoint, adapter: engine.Adapter{HealthPath: "/health"}, http: &http.Client{}}
	begin := time.Now()
	for attempt := 1; ; attempt++ {
		if err := c.waitHealthy(ctx, o.Wait); err != nil {
			return nil, permanent(ctx, err)
		}
		results, refused, err := c.recordAll(ctx, o)
		var broken *EngineError
		switch {
		case err == nil:
			counted, traced := counts.New(countedModel(o.Report)), newReservoir(o.TraceTokens, o.Seed)
			for _, result := range results {
				counted.Add(result.tokens, result.experts)
				traced.add(result)
			}
			return profileOf(o, counted, traced, refused, begin)
		case errors.As(err, &broken), ctx.Err() != nil:
			return nil, err
		case attempt == attempts:
			return nil, permanent(ctx, fmt.Errorf("the recorder failed %d times: %w", attempts, err))
		}
	}
}

// permanent returns an *EngineError, unless the context ended.
func permanent(ctx context.Context, err error) error {
	if ctx.Err() != nil {
		return err
	}
	return &EngineError{err.Error()}
}

// recorderModel is the part of the inspection's report that the recorder needs.
type recorderModel struct {
	Layers          int   `json:"layers"`
	MoELayers       []int `json:"moeLayers"`
	Experts         int   `json:"experts"`
	ExpertsPerToken int   `json:"expertsPerToken"`
}

type recordedRequest struct {
	Prompt   string    `json:"prompt,omitempty"`
	Messages []Message `json:"messages,omitempty"`
}

type recordBody struct {
	Model         recorderModel     `json:"model"`
	Tokens        int               `json:"tokens"`
	RequestTokens int               `json:"requestTokens"`
	Requests      []recordedRequest `json:"requests"`
}

// frame is a line of the recorder's response.
type frame struct {
	Event    string `json:"event"`
	Requests []struct {
		IDs     []int32 `json:"ids"`
		Refused string  `json:"refused"`
	} `json:"requests"`
	Layer   int    `json:"layer"`
	First   int    `json:"first"`
	Count   int    `json:"count"`
	Bytes   int    `json:"bytes"`
	Done    int    `json:"done"`
	Total   int    `json:"total"`
	Message string `json:"message"`
}

// recordAll sends all items, and returns the recorded requests in the order in which they were sent.
func (c *client) recordAll(ctx context.Context, o Options) (results []*recorded, refused int, err error) {
	order := sendOrder(o)
	body := recordBody{
		Model:  recorderModel{o.Report.Layers, o.Report.MoELayers, o.Report.Experts, o.Report.ExpertsPerToken},
		Tokens: o.Tokens, RequestTokens: o.RequestTokens,
	}
	for _, item := range order {
		body.Requests = append(body.Requests, recordedRequest{o.Items[item].Prompt, o.Items[item].Messages})
	}
	data, err := json.Marshal(body)
	if err != nil {
		return nil, 0, err
	}
	request, err := http.NewRequestWithContext(ctx, http.MethodPost, c.base+"/record", bytes.NewReader(data))
	if err != nil {
		return nil, 0, err
	}
	response, err := c.http.Do(request)
	if err != nil {
		return nil, 0, err
	}
	defer response.Body.Close()
	if response.StatusCode != http.StatusOK {
		text, _ := io.ReadAll(io.LimitReader(response.Body, 4096))
		err := fmt.Errorf("the recorder answered %s: %s", response.Status, bytes.TrimSpace(text))
		if response.StatusCode < http.StatusInternalServerError {
			return nil, 0, &EngineError{err.Error()}
		}
		return nil, 0, err
	}
	r := &recording{options: o, order: order, frames: bufio.NewReaderSize(response.Body, 1<<20)}
	if err := r.read(); err != nil {
		return nil, 0, err
	}
	return r.results, r.refused, nil
}

// recording is the state of a response of the recorder.
type recording struct {
	options Options
	order   []int
	frames  *bufio.Reader
	results []*recorded
	refused int
	begin   time.Time
	// layers is the number of recorded requests for each MoE layer.
	layers []int
}

// read reads all frames. It returns an *EngineError for a response that the protocol does not allow, and other errors
// if the connection ended.
func (r *recording) read() error {
	r.layers = make([]int, len(r.options.Report.MoELayers))
	for {
		line, err := readLine(r.frames, maxFrame)
		if err != nil {
			return fmt.Errorf("the response of the recorder ended early: %w", err)
		}
		var f frame
		if err := json.Unmarshal(line, &f); err != nil {
			return &EngineError{fmt.Sprintf("invalid response of the recorder: %v", err)}
		}
		switch f.Event {
		case "tokenized":
			err = r.tokenized(f)
		case "experts":
			err = r.experts(f)
		case "progress":
			r.progress(f)
		case "error":
			return &EngineError{"the recorder failed: " + f.Message}
		case "end":
			return r.end()
		}
		if err != nil {
			return err
		}
	}
}

// readLine returns the next line, of at most limit bytes.
func readLine(r *bufio.Reader, limit int) ([]byte, error) {
	var line []byte
	for {
		part, err := r.ReadSlice('\n')
		line = append(line, part...)
		if !errors.Is(err, bufio.ErrBufferFull) {
			return line, err
		}
		if len(line) > limit {
			return nil, &EngineError{fmt.Sprintf("a line of the recorder's response exceeds %d bytes", limit)}
		}
	}
}

func (r *recording) tokenized(f frame) error {
	if r.results != nil || len(f.Requests) > len(r.order) {
		return &EngineError{"invalid response of the recorder: it contains other requests"}
	}
	r.begin = time.Now()
	width := len(r.layers) * r.options.Report.ExpertsPerToken
	message := ""
	for i, request := range f.Requests {
		if len(request.IDs) == 0 {
			r.refused++
			message = fmt.Sprintf("line %d of the data set: %s", r.options.Items[r.order[i]].Line, request.Refused)
			continue
		}
		if len(request.IDs) > r.options.RequestTokens {
			return &EngineError{fmt.Sprintf("the recorder returned %d token IDs for a prompt: the maximum is %d", len(request.IDs), r.options.RequestTokens)}
		}
		if err := checkTokens(request.IDs, r.options.Report); err != nil {
			return err
		}
		r.results = append(r.results, &recorded{item: r.order[i], tokens: request.IDs, experts: make([]uint16, len(request.IDs)*width)})
	}
	if len(r.results) == 0 {
		return &EngineError{"the recorder refused all requests; the last one: " + message}
	}
	r.progress(f)
	return nil
}

// experts copies the experts of one layer into the rows of the requests.
func (r *recording) experts(f frame) error {
	layer := slices.Index(r.options.Report.MoELayers, f.Layer)
	if layer < 0 || f.First < 0 || f.Count < 1 || f.First > len(r.results)-f.Count {
		return &EngineError{fmt.Sprintf("invalid response of the recorder: %d requests from request %d on in layer %d", f.Count, f.First, f.Layer)}
	}
	top, experts := r.options.Report.ExpertsPerToken, r.options.Report.Experts
	row, want := len(r.layers)*top, 0
	requests := r.results[f.First : f.First+f.Count]
	for _, request := range requests {
		want += 2 * top * len(request.tokens)
	}
	if f.Bytes != want {
		return &EngineError{fmt.Sprintf("the recorder returned %d bytes for layer %d: the tokens need %d", f.Bytes, f.Layer, want)}
	}
	chosen := make([]byte, 2*top)
	for _, request := range requests {
		for token := range request.tokens {
			if _, err := io.ReadFull(r.frames, chosen); err != nil {
				return fmt.Errorf("the response of the recorder ended early: %w", err)
			}
			begin := token*row + layer*top
			for i := range top {
				expert := binary.LittleEndian.Uint16(chosen[2*i:])
				if int(expert) >= experts || slices.Contains(request.experts[begin:begin+i], expert) {
					return &EngineError{fmt.Sprintf("the recorder returned expert %d for token %d in layer %d: the %d experts of a token must differ and be below %d", expert, token, f.Layer, top, experts)}
				}
				request.experts[begin+i] = expert
			}
		}
	}
	r.layers[layer] += f.Count
	return nil
}

// progress reports the share of the layers that all requests have passed as the same share of the requests and tokens.
func (r *recording) progress(f frame) {
	p := Progress{Phase: Recording, Elapsed: time.Since(r.begin)}
	if f.Total > 0 && f.Done >= 0 && f.Done <= f.Total {
		tokens := 0
		for _, request := range r.results {
			tokens += len(request.tokens)
		}
		p.Done, p.Tokens = len(r.options.Items)*f.Done/f.Total, tokens*f.Done/f.Total
	}
	r.options.report(p)
}

// end checks that every layer has the experts of all requests.
func (r *recording) end() error {
	if len(r.results) == 0 {
		return &EngineError{"the recorder returned no requests"}
	}
	for i, requests := range r.layers {
		if requests != len(r.results) {
			return &EngineError{fmt.Sprintf("the recorder returned layer %d of %d requests: there are %d", r.options.Report.MoELayers[i], requests, len(r.results))}
		}
	}
	return nil
}

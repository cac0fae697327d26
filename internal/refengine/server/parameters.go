// SPDX-License-Identifier: Apache-2.0

package server

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math"
	"math/rand/v2"
	"net/http"
	"reflect"
	"slices"
	"strconv"
	"strings"

	"github.com/semmoe/operator/internal/refengine/scheduler"
)

// maxBodyBytes limits the size of a request body. The text of any prompt that fits into a context is much shorter.
const maxBodyBytes = 16 << 20

// parameters are the parameters that all routes share. OpenAI's routes have them at the top level. The route generate
// has the sampling parameters in sampling_params.
type parameters struct {
	samplingParameters
	routingParameters
	Stream bool `json:"stream"`

	// maxTokens has a different name on each route.
	maxTokens     *int
	maxTokensName string
	// echo requests a response that starts with the prompt.
	echo             bool
	defaultMaxTokens int
}

type samplingParameters struct {
	Temperature  *float64   `json:"temperature"`
	TopP         *float64   `json:"top_p"`
	TopK         *int       `json:"top_k"`
	Seed         *int64     `json:"seed"`
	SamplingSeed *int64     `json:"sampling_seed"`
	Stop         stringList `json:"stop"`
	StopTokenIDs []int32    `json:"stop_token_ids"`
	IgnoreEOS    bool       `json:"ignore_eos"`
}

type routingParameters struct {
	RoutedDPRank          *rankNumber `json:"routed_dp_rank"`
	DataParallelRank      *rankNumber `json:"data_parallel_rank"`
	ReturnRoutedExperts   bool        `json:"return_routed_experts"`
	RoutedExpertsStartLen int         `json:"routed_experts_start_len"`
	// RoutedExpertsPromptStart is vLLM's name of the start.
	RoutedExpertsPromptStart int  `json:"routed_experts_prompt_start"`
	ReturnTokenIDs           bool `json:"return_token_ids"`
	// rankHeader is the rank in the header, if the route reads it.
	rankHeader *int
}

// rankNumber is a number, also as a string, as pydantic reads one. Routes that read ranks reject a fraction.
type rankNumber float64

func (n *rankNumber) UnmarshalJSON(text []byte) error {
	value, err := strconv.ParseFloat(strings.TrimSpace(strings.Trim(string(text), `"`)), 64)
	if err != nil {
		return invalid("routed_dp_rank", "the rank %.100s is not a number", text)
	}
	*n = rankNumber(value)
	return nil
}

func (n rankNumber) isInteger() bool { return float64(n) == math.Trunc(float64(n)) }

// maxStops is the maximum number of stop strings, because each is compared with every piece of text.
const maxStops = 16

func (p samplingParameters) setSampling(j *job) error {
	j.sampling = scheduler.Sampling{TopP: 1, Seed: rand.Uint64()}
	switch {
	case p.Temperature != nil && *p.Temperature < 0:
		return badRequest("temperature", "temperature is %v; it must not be negative", *p.Temperature)
	case p.TopP != nil && (*p.TopP <= 0 || *p.TopP > 1):
		return badRequest("top_p", "top_p is %v; allowed is above 0, up to 1", *p.TopP)
	case p.TopK != nil && *p.TopK < -1:
		return badRequest("top_k", "top_k is %d; allowed is -1 (all) and more", *p.TopK)
	case len(p.Stop) > maxStops:
		return badRequest("stop", "stop has %d strings; allowed are up to %d", len(p.Stop), maxStops)
	case slices.Contains(p.Stop, ""):
		return badRequest("stop", "stop has an empty string; every stop string needs at least one character")
	}
	if p.Temperature != nil {
		j.sampling.Temperature = *p.Temperature
	}
	if p.TopP != nil {
		j.sampling.TopP = *p.TopP
	}
	if p.TopK != nil {
		j.sampling.TopK = max(*p.TopK, 0)
	}
	for _, seed := range []*int64{p.SamplingSeed, p.Seed} {
		if seed != nil {
			j.sampling.Seed = uint64(*seed)
		}
	}
	return nil
}

// stringList is a string or a list of strings.
type stringList []string

func (l *stringList) UnmarshalJSON(text []byte) error {
	var one *string
	if err := json.Unmarshal(text, &one); err == nil {
		if *l = nil; one != nil {
			*l = stringList{*one}
		}
		return nil
	}
	var many []string
	if err := json.Unmarshal(text, &many); err != nil {
		return errors.New("stop must be a string or a list of strings")
	}
	*l = many
	return nil
}

// unsupported lists parameters that would change the output but are not supported, with the values that disable them.
var unsupported = map[string][]any{
	"n": {1.0}, "best_of": {1.0}, "suffix": {""}, "presence_penalty": {0.0}, "frequency_penalty": {0.0},
	"repetition_penalty": {1.0}, "logit_bias": {map[string]any{}}, "min_p": {0.0}, "min_tokens": {0.0}, "min_new_tokens": {0.0},
	"regex": {""}, "ebnf": {""}, "json_schema": {""}, "structural_tag": {""}, "stop_regex": {""}, "lora_path": {""},
	"tools": {[]any{}}, "functions": {[]any{}}, "response_format": {map[string]any{"type": "text"}}, "image_data": {[]any{}},
	"no_stop_trim": {false}, "skip_special_tokens": {true}, "stream_interval": {1.0},
}

func checkUnsupported(fields map[string]json.RawMessage) error {
	for name, raw := range fields {
		unused, listed := unsupported[name]
		if !listed {
			continue
		}
		var value any
		if err := json.Unmarshal(raw, &value); err != nil {
			return badRequest(name, "%s: %v", name, err)
		}
		if value != nil && !slices.ContainsFunc(unused, func(u any) bool { return reflect.DeepEqual(u, value) }) {
			return badRequest(name, "%s %.100s is not supported by this engine; leave it out", name, raw)
		}
	}
	return nil
}

// decode decodes a JSON body into value. It ignores unknown fields and rejects unsupported parameters.
func decode(w http.ResponseWriter, r *http.Request, value any) error {
	body, err := io.ReadAll(http.MaxBytesReader(w, r.Body, maxBodyBytes))
	if err != nil {
		var tooLarge *http.MaxBytesError
		if errors.As(err, &tooLarge) {
			return err
		}
		return badRequest("", "the request body cannot be read: %v", err)
	}
	return decodeObject(body, value)
}

func decodeObject(text []byte, value any) error {
	var fields map[string]json.RawMessage
	if err := json.Unmarshal(text, &fields); err != nil {
		return invalid("", "the request body is not a JSON object: %v", err)
	}
	if err := checkUnsupported(fields); err != nil {
		return err
	}
	if err := json.NewDecoder(bytes.NewReader(text)).Decode(value); err != nil {
		var mismatch *json.UnmarshalTypeError
		if errors.As(err, &mismatch) {
			field := mismatch.Field
			for at := strings.IndexByte(field, '.'); at >= 0 && fields[field[:at]] == nil; at = strings.IndexByte(field, '.') {
				field = field[at+1:] // encoding/json puts the names of embedded structs in front
			}
			return invalid(field, "%s has the wrong type: %s, want %s", field, mismatch.Value, jsonType(mismatch.Type))
		}
		var api *apiError
		if errors.As(err, &api) {
			return api
		}
		return invalid("", "the request body: %v", err)
	}
	return nil
}

// jsonType returns the name of the JSON values that decode to a type.
func jsonType(t reflect.Type) string {
	switch t.Kind() {
	case reflect.Pointer:
		return jsonType(t.Elem())
	case reflect.Struct, reflect.Map:
		return "an object"
	case reflect.Slice, reflect.Array:
		return "a list"
	case reflect.String:
		return "a string"
	case reflect.Bool:
		return "true or false"
	case reflect.Float32, reflect.Float64:
		return "a number"
	default:
		return "an integer"
	}
}

// promptInput is a string, a list with one string, a list of token IDs, or a list with one such list.
type promptInput struct {
	text *string
	ids  []int32
}

func (p *promptInput) UnmarshalJSON(text []byte) error {
	if p.readOne(text) {
		return nil
	}
	var many []json.RawMessage
	switch err := json.Unmarshal(text, &many); {
	case err == nil && len(many) > 1:
		return fmt.Errorf("the prompt has %d entries; this engine accepts one prompt per request", len(many))
	case err == nil && p.readOne(many[0]): // an empty list is an empty list of token IDs
		return nil
	}
	return errors.New("the prompt must be a string or a list of token ids")
}

// readOne decodes a string or a list of token IDs, and reports whether it succeeded.
func (p *promptInput) readOne(text []byte) bool {
	var one *string
	if json.Unmarshal(text, &one) == nil {
		p.text = one
		return true
	}
	var ids []int32
	if json.Unmarshal(text, &ids) == nil {
		p.ids = ids
		return true
	}
	return false
}

// tokens encodes the prompt.
func (e *Engine) tokens(p promptInput) []int32 {
	if p.text != nil {
		return e.Tokenizer.Encode(*p.text)
	}
	return p.ids
}

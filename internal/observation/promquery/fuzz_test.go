// SPDX-License-Identifier: Apache-2.0

package promquery

import (
	"bytes"
	"errors"
	"io"
	"net/http"
	"testing"
	"time"
)

// fixedBody responds to every request with the same body.
type fixedBody []byte

func (a fixedBody) RoundTrip(request *http.Request) (*http.Response, error) {
	return &http.Response{
		StatusCode: http.StatusOK, Header: http.Header{"Content-Type": {"application/json"}}, Body: io.NopCloser(bytes.NewReader(a)), Request: request,
	}, nil
}

// FuzzRange verifies that any response results in a series or an *Error.
func FuzzRange(f *testing.F) {
	for _, text := range []string{
		`{"status":"success","data":{"resultType":"matrix","result":[{"metric":{"a":"b"},"values":[[1,"2"],[2,"NaN"]]}]}}`,
		`{"status":"success","data":{"resultType":"matrix","result":[]}}`, `{"status":"success","data":{"resultType":"vector","result":[{}]}}`,
		`{"status":"error","errorType":"bad_data","error":"x"}`, `{"status":"success","warnings":["w"],"data":{"resultType":"scalar","result":[1,"2"]}}`, `[]`, `null`, ``,
	} {
		f.Add([]byte(text))
	}
	f.Fuzz(func(t *testing.T, text []byte) {
		client := Client{Transport: fixedBody(text)}
		now := time.Unix(1_700_000_000, 0)
		points, err := client.Range(t.Context(), Query{Address: "http://prometheus.invalid", Expression: "up", Start: now, End: now.Add(time.Minute), Step: time.Minute})
		var e *Error
		if err != nil && (!errors.As(err, &e) || e.Reason == "" || e.Message == "") || err == nil && len(points) == 0 {
			t.Fatalf("%d points, %v", len(points), err)
		}
	})
}

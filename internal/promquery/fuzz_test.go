package promquery

import (
	"bytes"
	"errors"
	"io"
	"net/http"
	"testing"
	"time"
)

// answer is a server's body for every request.
type answer []byte

func (a answer) RoundTrip(request *http.Request) (*http.Response, error) {
	return &http.Response{
		StatusCode: http.StatusOK, Header: http.Header{"Content-Type": {"application/json"}}, Body: io.NopCloser(bytes.NewReader(a)), Request: request,
	}, nil
}

// Whatever a server answers is a series or an *Error.
func FuzzRange(f *testing.F) {
	for _, text := range []string{
		`{"status":"success","data":{"resultType":"matrix","result":[{"metric":{"a":"b"},"values":[[1,"2"],[2,"NaN"]]}]}}`,
		`{"status":"success","data":{"resultType":"matrix","result":[]}}`, `{"status":"success","data":{"resultType":"vector","result":[{}]}}`,
		`{"status":"error","errorType":"bad_data","error":"x"}`, `{"status":"success","warnings":["w"],"data":{"resultType":"scalar","result":[1,"2"]}}`, `[]`, `null`, ``,
	} {
		f.Add([]byte(text))
	}
	f.Fuzz(func(t *testing.T, text []byte) {
		client := Client{Transport: answer(text)}
		now := time.Unix(1_700_000_000, 0)
		points, err := client.Range(t.Context(), Query{Address: "http://prometheus.invalid", Expression: "up", Start: now, End: now.Add(time.Minute), Step: time.Minute})
		var told *Error
		if err != nil && (!errors.As(err, &told) || told.Reason == "" || told.Message == "") || err == nil && len(points) == 0 {
			t.Fatalf("%d points, %v", len(points), err)
		}
	})
}

// SPDX-License-Identifier: Apache-2.0

package store

import (
	"context"
	"encoding/json"
	"errors"
	"io"
	"net"
	"net/http"
	"strconv"
	"strings"
	"time"

	"github.com/go-logr/logr"

	"github.com/semmoe/operator/internal/artifact"
)

// stallTimeout is the maximum time without progress of a transfer. The time limit of a whole upload depends on its size
// (uploadDeadline).
const stallTimeout = time.Minute

// handler implements the protocol.
type handler struct {
	store    *Store
	identify func(ctx context.Context, address, token string) (caller, error)
	metrics  *metrics
	log      logr.Logger
	maxBytes int64
	uploads  uploads
}

// request is one request with its parsed path and its caller.
type request struct {
	*http.Request
	w     *response
	log   logr.Logger
	scope artifact.Scope
	who   caller
}

func (h *handler) routes() http.Handler {
	mux := http.NewServeMux()
	const scope = "/v1/namespaces/{namespace}/{kind}/{id}"
	for pattern, route := range map[string]struct {
		operation string
		verb      Verb
		serve     func(*request) error
	}{
		"PUT " + scope + "/artifacts/{digest}":    {"put", Write, h.put},
		"GET " + scope + "/artifacts/{digest}":    {"get", Read, h.get},
		"HEAD " + scope + "/artifacts/{digest}":   {"head", Read, h.head},
		"DELETE " + scope + "/artifacts/{digest}": {"delete", Delete, h.delete},
		"GET " + scope + "/artifacts":             {"list", Read, h.list},
		"PUT " + scope + "/result":                {"publish", Write, h.publish},
		"GET " + scope + "/result":                {"result", Read, h.result},
		"GET /v1/artifacts":                       {"list-all", Read, h.listAll},
	} {
		mux.Handle(pattern, h.handle(route.operation, route.verb, route.serve))
	}
	return mux
}

// handle admits a caller, runs the operation, and sends its error.
func (h *handler) handle(operation string, verb Verb, serve func(*request) error) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		start := time.Now()
		out := &response{ResponseWriter: w, control: http.NewResponseController(w)}
		out.extend() // a reused connection still has the deadline of its previous response
		req := &request{Request: r, w: out, log: h.log.WithValues("operation", operation)}
		defer func() {
			h.metrics.requests.WithLabelValues(operation, strconv.Itoa(out.status())).Inc()
			h.metrics.seconds.WithLabelValues(operation).Observe(time.Since(start).Seconds())
		}()
		err := h.admit(req, verb)
		if err == nil {
			err = serve(req)
		}
		if err != nil {
			h.answer(req, err)
			return
		}
		req.log.V(1).Info("Served", "duration", time.Since(start).String())
	})
}

// admit determines the scope and the caller, and checks the policy.
func (h *handler) admit(r *request, verb Verb) error {
	everything := r.PathValue("namespace") == ""
	if !everything {
		r.scope = artifact.Scope{Namespace: r.PathValue("namespace"), Kind: artifact.Kind(r.PathValue("kind")), ID: r.PathValue("id")}
		if err := r.scope.Validate(); err != nil {
			return fail(http.StatusBadRequest, "%v", err)
		}
		r.log = r.log.WithValues("scope", r.scope.String())
	}
	token, _ := strings.CutPrefix(r.Header.Get("Authorization"), "Bearer ")
	address, _, _ := net.SplitHostPort(r.RemoteAddr) // RemoteAddr is set by the server and valid
	who, err := h.identify(r.Context(), address, token)
	if err != nil {
		return err
	}
	r.who, r.log = who, r.log.WithValues("caller", who.name())
	if everything && !who.manager {
		return fail(http.StatusForbidden, "only the manager is allowed to list all artifacts")
	}
	if err := who.authorize(verb, r.scope); err != nil {
		return fail(http.StatusForbidden, "%v", err)
	}
	return nil
}

// answer sends an error. If a part of the body was already sent, it closes the connection instead, so that the client
// detects the incomplete body.
func (h *handler) answer(r *request, err error) {
	status := &artifact.StatusError{Code: http.StatusInternalServerError, Message: "internal error of the store; its log contains the cause"}
	var gone *clientError
	switch {
	case errors.As(err, &status):
		level := 0
		if status.Code == http.StatusNotFound { // expected for first lookups and for availability checks
			level = 1
		}
		r.log.V(level).Info("Request rejected", "status", status.Code, "reason", err.Error())
	case errors.As(err, &gone), r.Context().Err() != nil:
		status = &artifact.StatusError{Code: http.StatusRequestTimeout, Message: "the transfer was interrupted, made no progress for " + stallTimeout.String() + ", or was slower than 64 KiB/s"}
		r.log.Info("Transfer interrupted", "reason", err.Error())
	default:
		r.log.Error(err, "Request failed")
	}
	if r.w.code != 0 {
		panic(http.ErrAbortHandler)
	}
	r.w.json(status.Code, map[string]string{"error": status.Message})
}

func (h *handler) put(r *request) error {
	digest, err := digestOf(r)
	if err != nil {
		return err
	}
	switch {
	case r.ContentLength < 0:
		return fail(http.StatusLengthRequired, "the header Content-Length is required")
	case r.ContentLength > h.maxBytes:
		return fail(http.StatusRequestEntityTooLarge, "the artifact has %d bytes, and the maximum is %d", r.ContentLength, h.maxBytes)
	}
	end, err := h.uploads.begin(r.who)
	if err != nil {
		return err
	}
	defer end()
	present, err := h.store.List(r.Context(), &r.scope)
	if err != nil {
		return err
	}
	if err := checkScope(present, digest, r.ContentLength, h.maxBytes); err != nil {
		return err
	}
	body := &upload{r: r.Body, control: r.w.control, deadline: uploadDeadline(time.Now(), r.ContentLength)}
	err = h.store.Put(r.Context(), r.scope, digest, body, r.ContentLength)
	h.metrics.bytes.WithLabelValues("in").Add(float64(body.received))
	if err != nil {
		// The rest of the body is read, because a client that is still sending would see a broken connection instead of
		// the response.
		if body.received > 0 {
			io.Copy(io.Discard, body) //nolint:errcheck // the first error is reported
		}
		return err
	}
	r.log.Info("Stored", "digest", digest, "bytes", r.ContentLength)
	r.w.json(http.StatusCreated, artifact.Result{Digest: digest})
	return nil
}

// get sends the bytes. Damage is detected only after all bytes are sent. The client detects it, too. The store logs the
// damage and deletes the bytes.
func (h *handler) get(r *request) error {
	digest, err := digestOf(r)
	if err != nil {
		return err
	}
	content, size, err := h.store.Get(r.Context(), r.scope, digest)
	if err != nil {
		return err
	}
	defer content.Close()
	r.w.Header().Set("Content-Type", "application/octet-stream")
	r.w.Header().Set("Content-Length", strconv.FormatInt(size, 10))
	sent, err := io.Copy(r.w, content)
	h.metrics.bytes.WithLabelValues("out").Add(float64(sent))
	if errors.Is(err, artifact.ErrCorrupt) {
		h.metrics.corrupt.Inc()
		r.log.Error(err, "Stored bytes are damaged", "digest", digest)
		h.discard(r, digest)
		return nil
	}
	return err
}

// discard deletes damaged bytes, also if the client has disconnected.
func (h *handler) discard(r *request, digest artifact.Digest) {
	switch discarded, err := h.store.Discard(context.WithoutCancel(r.Context()), r.scope, digest); {
	case err != nil:
		r.log.Error(err, "Failed to delete the damaged bytes", "digest", digest)
	case discarded:
		r.log.Info("Deleted the damaged bytes", "digest", digest)
	default:
		r.log.Info("The bytes are intact when read again", "digest", digest)
	}
}

func (h *handler) head(r *request) error {
	digest, err := digestOf(r)
	if err != nil {
		return err
	}
	found, err := h.store.Stat(r.Context(), r.scope, digest)
	if err != nil {
		return err
	}
	r.w.Header().Set("Content-Length", strconv.FormatInt(found.Size, 10))
	r.w.WriteHeader(http.StatusOK)
	return nil
}

func (h *handler) delete(r *request) error {
	digest, err := digestOf(r)
	if err != nil {
		return err
	}
	modified, err := time.Parse(time.RFC3339Nano, r.URL.Query().Get("modified"))
	if err != nil {
		return fail(http.StatusBadRequest, "parameter modified: must be the time (RFC 3339) that a list shows for the artifact")
	}
	if err := h.store.Delete(r.Context(), r.scope, digest, modified); err != nil {
		return err
	}
	r.log.Info("Deleted", "digest", digest)
	r.w.WriteHeader(http.StatusNoContent)
	return nil
}

func (h *handler) list(r *request) error    { return h.listScope(r, &r.scope) }
func (h *handler) listAll(r *request) error { return h.listScope(r, nil) }

func (h *handler) listScope(r *request, scope *artifact.Scope) error {
	artifacts, err := h.store.List(r.Context(), scope)
	if err != nil {
		return err
	}
	r.w.json(http.StatusOK, artifact.List{Artifacts: artifacts})
	return nil
}

func (h *handler) publish(r *request) error {
	var asked artifact.Result
	if err := json.NewDecoder(io.LimitReader(r.Body, maxResult)).Decode(&asked); err != nil {
		return fail(http.StatusBadRequest, `body: must be {"digest": "<sha256>"}`)
	}
	digest, err := artifact.ParseDigest(string(asked.Digest))
	if err != nil {
		return fail(http.StatusBadRequest, "%v", err)
	}
	won, err := h.store.Publish(r.Context(), r.scope, digest)
	if err != nil {
		return err
	}
	r.log.Info("Published", "digest", won, "requested", digest)
	r.w.json(http.StatusOK, artifact.Result{Digest: won})
	return nil
}

func (h *handler) result(r *request) error {
	digest, err := h.store.Published(r.Context(), r.scope)
	if err != nil {
		return err
	}
	r.w.json(http.StatusOK, artifact.Result{Digest: digest})
	return nil
}

func digestOf(r *request) (artifact.Digest, error) {
	digest, err := artifact.ParseDigest(r.PathValue("digest"))
	if err != nil {
		return "", fail(http.StatusBadRequest, "%v", err)
	}
	return digest, nil
}

// clientError is an error of the connection to the client.
type clientError struct{ error }

func (e *clientError) Unwrap() error { return e.error }

// response records the status, and extends the write deadline of its connection with each part.
type response struct {
	http.ResponseWriter
	control *http.ResponseController
	code    int
}

func (w *response) WriteHeader(code int) {
	w.code = code
	w.ResponseWriter.WriteHeader(code)
}

func (w *response) Write(p []byte) (int, error) {
	w.code = max(w.code, http.StatusOK)
	w.extend()
	n, err := w.ResponseWriter.Write(p)
	if err != nil {
		err = &clientError{err}
	}
	return n, err
}

func (w *response) status() int { return max(w.code, http.StatusOK) }

func (w *response) json(code int, value any) {
	w.Header().Set("Content-Type", "application/json")
	w.WriteHeader(code)
	json.NewEncoder(w).Encode(value) //nolint:errcheck // the client has disconnected
}

// extend extends the write deadline. The error can be ignored, because all connections of the server support deadlines.
func (w *response) extend() { w.control.SetWriteDeadline(time.Now().Add(stallTimeout)) } //nolint:errcheck

// upload reads the body of a request. Each part extends the read deadline of the connection, up to the deadline of the
// whole upload. After the last part there is no deadline, because the disk may be slow.
type upload struct {
	r        io.Reader
	control  *http.ResponseController
	deadline time.Time
	received int64
}

func (u *upload) Read(p []byte) (int, error) {
	next := time.Now().Add(stallTimeout)
	if u.deadline.Before(next) {
		next = u.deadline
	}
	u.control.SetReadDeadline(next) //nolint:errcheck
	n, err := u.r.Read(p)
	u.received += int64(n)
	switch {
	case err == io.EOF:
		u.control.SetReadDeadline(time.Time{}) //nolint:errcheck
	case err != nil:
		err = &clientError{err}
	}
	return n, err
}

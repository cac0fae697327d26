from flask import Blueprint, abort, current_app, jsonify, request
from sqlalchemy import select

from .models import Comment, Post, db

api = Blueprint("api", __name__, url_prefix="/api/v1")


@api.get("/posts")
def list_posts():
    page = request.args.get("page", 1, type=int)
    size = min(request.args.get("size", 20, type=int), 100)
    query = select(Post).order_by(Post.created.desc()).offset((page - 1) * size).limit(size)
    posts = db.session.scalars(query).all()
    return jsonify(items=[post.to_dict() for post in posts], page=page, size=size)


@api.post("/posts/<int:post_id>/comments")
def add_comment(post_id):
    post = db.session.get(Post, post_id)
    if post is None:
        abort(404, description=f"post {post_id} does not exist")
    body = request.get_json(silent=True) or {}
    text = body.get("text", "").strip()
    if not text:
        abort(400, description="text must not be empty")
    comment = Comment(post=post, text=text, author=body.get("author", "anonymous"))
    db.session.add(comment)
    db.session.commit()
    current_app.logger.info("comment %d on post %d", comment.id, post.id)
    return jsonify(comment.to_dict()), 201
